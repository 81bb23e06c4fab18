"""`flash`: packed attention by varlen kernels, one call per layer for a whole row.

No mask exists and nothing is computed between documents, as in `segmented`, but without its calls per segment. Every layer
gets the kernel that was found right for its features (kernel_choice.py): a model may mix layers with and without windows.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.integrations.flash_attention import get_target_dtype

from packtrain.attention.backends import AttentionFunction, Service
from packtrain.attention.flattened import registered
from packtrain.attention.kernel_choice import LayerFeatures, choose_kernel
from packtrain.attention.varlen import Scoring, attend_by_segments, fewer_bytes_in_place
from packtrain.errors import CheckFailed
from packtrain.packing.segments import Segments

NAME = "packtrain_varlen"
_DROPS = "the kernels drop no scores (set model.config.attention_dropout=0, or the like of its type)"
_OTHER = "set model.attention=auto: segmented and per_document need no kernel"


@registered(NAME)
def flash_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    window: int | None,
    *,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    dropout: float = 0.0,
    **_: object,
) -> torch.Tensor:
    """Call a varlen kernel once; `s_aux` (sinks) [heads]. The output has the kernel's number format. Raises CheckFailed if no
    kernel is right for the layer."""
    if segments.blocks:
        what = f"{type(module).__name__} sees pictures both ways, the kernels only one way"
        raise CheckFailed(what, fix=_OTHER, code="kernels-see-one-way")
    if dropout:
        raise CheckFailed(f"{type(module).__name__}: {_DROPS}", fix=_OTHER, code="kernels-drop-nothing")
    # layer norms and rotary embeddings return float32 under autocast and with PEFT
    dtype = get_target_dtype(query, module) or query.dtype
    q, k, v = (tensor[0].transpose(0, 1).to(dtype) for tensor in (query, key, value))
    group, window_used, sinks = q.shape[1] // k.shape[1], window is not None, s_aux is not None
    in_place = not window_used and fewer_bytes_in_place(segments, q.shape[1], k.shape[1])
    layer = LayerFeatures(dtype, group, q.shape[2], v.shape[2], window_used, softcap, sinks, in_place)
    choice = choose_kernel(layer, query.device)
    if choice.kernel is None:
        what = f"no flash kernel serves {type(module).__name__}: {choice.why_not()}"
        raise CheckFailed(what, fix=_OTHER, code="no-flash-kernel")
    scoring = Scoring(q.shape[2] ** -0.5 if scaling is None else scaling, window, softcap)
    return attend_by_segments(choice.kernel, q, k, v, segments, scoring, s_aux)[None]


class Flash(AttentionFunction):
    """The backend: a kernel for each layer."""

    def serve(self, model: PreTrainedModel, device: torch.device, dtype: torch.dtype) -> Service:
        """See Attention. It takes the kernel of a plain layer.

        Special needs of single layers (windows, sinks) are checked when they run; dropout is read from the config, since proofs run
        without it.
        """
        config = model.config.get_text_config()
        if any(getattr(config, name, None) for name in ("attention_dropout", "attn_pdrop", "attn_dropout")):
            return Service(None, _DROPS)
        choice = choose_kernel(plain_features(config, dtype), device)
        if choice.kernel is None:
            return Service(None, f"no kernel is right: {choice.why_not()}")
        name = choice.kernel.name
        return Service(name, f"{name} ({choice.why_not()})" if choice.lacks else name)


def plain_features(config: PreTrainedConfig, dtype: torch.dtype) -> LayerFeatures:
    """Return the features of an attention layer by the model's config. Windows, soft-cap and sinks are left out."""
    heads = getattr(config, "num_attention_heads", None) or 1
    kv_heads = getattr(config, "num_key_value_heads", None) or heads
    head_dim = getattr(config, "head_dim", None) or getattr(config, "hidden_size", 64 * heads) // heads
    head_dim = getattr(config, "qk_head_dim", None) or head_dim  # latent attention has heads of two widths
    value_dim = getattr(config, "v_head_dim", None) or head_dim
    return LayerFeatures(dtype, max(1, heads // kv_heads), head_dim, value_dim)


ATTENTION = Flash(NAME)
