"""Tests that train: tiny models on one thread, so that small machines are not fought over."""

from __future__ import annotations

import torch

torch.set_num_threads(1)
