"""What the rule of tiny.py cannot know: types that need another value."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Quirk:
    """Config values that a type needs, and why; `full` before the layers are chosen, `small` after everything else.

    A type that appears as the text part of another has its quirk there too (`small` only).
    """

    reason: str
    small: dict[str, Any] = field(default_factory=dict)
    full: dict[str, Any] = field(default_factory=dict)


_INNER_WIDTH = "the state-space heads must fill the inner width, twice the hidden one"
_GLOBAL_HEADS = "global layers have wider heads, by a name that is no field"

_NO_TOWER = "no tower by default, where each released model has one"
_NO_FIELD = "reads an id that released configs have, and that is no field"
_SECTIONS = "sections of rotary positions must add up to half a head"
_SCALES = Quirk("up to five scales of 256 channels", {"channel_multiplier": [1, 1]})
_WIDE = Quirk("convolutions that get wider", {"downsample_channels": [32, 64]})


def _three(*sections: int, **more: float) -> Quirk:
    """Rotary positions with an own section of a small head for time, height and width."""
    settings = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [*sections], **more}
    return Quirk(_SECTIONS, {"rope_parameters": settings})


QUIRKS: dict[str, Quirk] = {
    "bamba": Quirk(_INNER_WIDTH + "; no layer attends by default", {"mamba_n_heads": 8, "mamba_d_head": 16, "attn_layer_indices": [1]}),
    "cohere_compass_text": Quirk("rotary settings per kind of layer have no default", {"layer_types": ["sliding_attention", "full_attention"], "rope_parameters": {"sliding_attention": {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [4, 2, 2]}, "full_attention": None}}),
    "dbrx": Quirk("its attention reads rope_theta from a part that has no such field", {"attn_config": {"kv_n_heads": 1, "rope_theta": 1e4, "clip_qkv": 8.0}}),
    "deepseek_v4": Quirk("the second compression would swallow every document whole", {"compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}}),
    "deepseek_v2": Quirk("no number of experts per token by default", {"num_experts_per_tok": 2}),
    "doge": Quirk("chooses keys by a mask of its own, which a window would hide", {"sliding_window": None}),
    "dory": Quirk("its parts, of which the middle one runs twice, must add up to all layers", {"num_hidden_layers": 3, "layer_types": ["sliding_attention", "full_attention", "sliding_attention"], "n_input_layers": 1, "n_recurrent_layers": 1, "n_output_layers": 1}),
    "dots1": Quirk("no number of experts by default", {"n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1}),
    "dots3_note_text": Quirk("local layers have sizes of their own, by names that are no fields", {"swa_num_attention_heads": 4, "swa_num_key_value_heads": 4, "swa_q_lora_rank": 16, "swa_kv_lora_rank": 16, "swa_head_dim": 32, "swa_qk_nope_head_dim": 16, "swa_v_head_dim": 16}),
    "gemma3n_text": Quirk("layers that share keys and values need one of their kind before them", {"num_hidden_layers": 4, "layer_types": ["sliding_attention", "full_attention"] * 2, "intermediate_size": [96] * 4, "activation_sparsity_pattern": [0.95, 0.0] * 2, "num_kv_shared_layers": 2}),
    "gemma4_text": Quirk(_GLOBAL_HEADS, {"global_head_dim": 32}),
    "gemma4_unified_text": Quirk(_GLOBAL_HEADS, {"global_head_dim": 32}),
    "gpt_neo": Quirk("layers are listed in a shorthand", {"attention_types": [[["global", "local"], 1]]}),
    "granitemoehybrid": Quirk(_INNER_WIDTH, {"mamba_n_heads": 8, "mamba_d_head": 16}, {"layer_types": ["mamba", "attention"] * 16}),
    "jamba": Quirk("attention and experts come by periods", {"attn_layer_period": 2, "attn_layer_offset": 1, "expert_layer_period": 2, "expert_layer_offset": 0}),
    "lfm2": Quirk("every layer attends by default", {"num_hidden_layers": 2, "layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": Quirk("kinds of layers have no default", {"layer_types": ["conv", "full_attention"]}),
    "laguna": Quirk("no layer is local by default", full={"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"], "mlp_layer_types": ["dense", "sparse"], "num_attention_heads_per_layer": [48, 48]}),
    "mamba2": Quirk(_INNER_WIDTH, {"num_heads": 8}),
    "mellum": Quirk("no layer is local by default", full={"num_hidden_layers": 2, "layer_types": ["sliding_attention", "full_attention"]}),
    "minimax_m3_vl_text": Quirk("no layer is sparse by default", {"index_block_size": 8}, {"num_hidden_layers": 2, "layer_types": ["minimax_m3_sparse", "full_attention"]}),
    "flint": Quirk("no layer has experts in its first two layers", {"mlp_only_layers": [0]}),
    "qwen4_exp_text": Quirk("its indexer has no sizes by default", {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16, "indexer_budget": 8, "indexer_compress_ratio": 2}),
    "recurrent_gemma": Quirk("three kinds of layers in turn, and only two layers", {"block_types": ["recurrent", "attention"]}),
    "reformer": Quirk("the hidden width and the longest row are products of its axial positions", {"axial_pos_shape": [16, 16], "axial_pos_embds_dim": [32, 32], "lsh_attn_chunk_length": 8, "local_attn_chunk_length": 8, "hash_seed": 0}),
    "xlm": Quirk("sees both ways unless it is told", {"causal": True}),
    "xlnet": Quirk("sees both ways unless it is told", {"attn_type": "uni"}),
    "xlstm": Quirk("longer rows than this go through code that fails on them", {"max_inference_chunksize": 256}),
    "xmod": Quirk("a language must be chosen", {"default_language": "en_XX"}),
    "zamba": Quirk("ties its attention layers to each other, so it needs two", {"num_hidden_layers": 3, "attention_hidden_size": 128, "attention_head_dim": 32, "layers_block_type": ["hybrid", "linear_attention", "hybrid"]}),
    "apertus1p5": Quirk("pictures and sounds are tokens, in ranges one after the other", {"image_token_offset": 96, "audio_token_offset": 112}),
    "apertus1p5_vision_tokenizer": Quirk("its range of tokens, and five scales of 256 channels", {"codebook_size": 16, "channel_multiplier": [1, 1]}),
    "wavtokenizer_encoder": Quirk("its range of tokens, and convolutions that get wider", {"codebook_size": 16, "num_filters": 4}),
    "chameleon": Quirk("pictures are tokens, whose names the vocabulary tells", {"vocabulary_map": {"<image>": 1, "IMGIMGAZ": 0}}),
    "chameleon_vqgan": _SCALES,
    "cosmos3_edge_text": _three(3, 3, 2),
    "deepseek_ocr2_text": Quirk("kinds of layers and experts per token have no default", {"mlp_layer_types": ["dense", "sparse"], "num_experts_per_tok": 2}),
    "deepseek_ocr2_sam_vision_model": _WIDE,
    "emu3_vqgan": _SCALES,
    "emu3": Quirk("pictures are tokens, whose names the vocabulary tells", {"vocabulary_map": {"<image>": 1, "<|extra_200|>": 2, "<|visual token 000000|>": 0}}),
    "ernie4_5_vl_moe_text": Quirk(_SECTIONS + "; widths of experts of text and of pictures", {**_three(3, 3, 2).small, "moe_intermediate_size": [96, 32]}),
    "fun_asr_nano": Quirk("its adaptor is a fourth as wide as the text", {"adaptor_config": {"hidden_size": 64, "intermediate_size": 16, "num_attention_heads": 4, "projector_hidden_size": 64}}),
    "gemma4": Quirk(_NO_TOWER, full={"vision_config": {}}),
    "gemma4_unified": Quirk(_NO_TOWER, full={"vision_config": {}}),
    "glm4v_text": _three(2, 3, 3),
    "glm4v_moe_text": _three(1, 1, 2, partial_rotary_factor=0.5),
    "glm_ocr_text": _three(2, 3, 3),
    "glm5_next_text": Quirk("chooses keys by groups, which divide what it chooses", {"index_kpool": 4}),
    "granite4_vision": Quirk("which layers get pictures has no default", {"deepstack_layer_map": [[-1, 0]], "downsample_rate": "1/2", "spatial_target_layers": [1, 1, 1, 1]}),
    "hunyuan_vl_text": _three(2, 2, 2, 2),
    "hy_v4_vl_text": _three(2, 3, 3),
    "janus_vqgan": _SCALES,
    "molmo2_adapter": Quirk("reads from the last layers of the tower", {"vision_feature_layer": [-1, -2]}),
    "nemotron3_5_transcribe_word_timestamp": Quirk("its last class", {"blank_token_id": 127}),
    "paddleocr_vl_text": _three(2, 3, 3),
    "qwen2_vl_text": _three(2, 3, 3),
    "qwen2_5_vl_text": _three(2, 3, 3),
    "qwen2_5_omni_text": _three(2, 3, 3),
    "qwen2_5_omni_thinker": Quirk(_NO_FIELD, {"vision_start_token_id": 151652}),
    "qwen3_omni_moe_text": Quirk(_SECTIONS + "; reads a window that no released model has", {**_three(2, 3, 3).small, "sliding_window": None}),
    "qwen3_omni_moe_thinker": Quirk(_NO_FIELD, {"vision_start_token_id": 151652}),
    "unlimited_ocr_sam_vision_model": _WIDE,
    "vibevoice_asr": Quirk("a multiple of the samples of a token", {"acoustic_tokenizer_chunk_size": 3200 * 256}),
    "vibevoice_acoustic_tokenizer_encoder": Quirk("convolutions that get wider", {"num_filters": 2}),
    "radio": Quirk("the model around it asks for it", {"video_temporal_patch_size": 2}),
}  # fmt: skip
