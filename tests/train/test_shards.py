"""Shards that cannot be written: an error like any other, for the one place that tells users of full disks."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from packtrain.model.spread import save_shards, shards_of


def test_a_disk_that_refuses_shards_raises_the_systems_error(tmp_path: Path) -> None:
    model = torch.nn.Linear(2, 2)
    optimizer = torch.optim.SGD(model.parameters())
    (tmp_path / "shards").write_text("a file in the way")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        with pytest.raises(OSError, match="shards"):
            save_shards(shards_of(model, optimizer), tmp_path)
    finally:
        dist.destroy_process_group()
