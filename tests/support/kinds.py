"""Sparse and quantised tensors of every kind, by name."""

from __future__ import annotations

import warnings

import torch

with warnings.catch_warnings():  # torch warns once that compressed and quantised ones may change
    warnings.simplefilter("ignore")
    DENSE = torch.arange(48.0).view(8, 6).remainder(5)
    SCALES = torch.linspace(0.1, 0.8, 8)
    KINDS = {
        "coo": DENSE.to_sparse(),
        "uncoalesced": torch.sparse_coo_tensor(
            torch.tensor([[0, 0, 1], [2, 2, 0]]), torch.tensor([1.0, 2, 3]), (2, 3)
        ),
        "hybrid": DENSE.view(8, 3, 2).to_sparse(1),
        "csr": DENSE.to_sparse_csr(),
        "csc": DENSE.double().to_sparse_csc(),
        "bsr": DENSE.to_sparse_bsr((2, 2)),
        "bsc": DENSE.bfloat16().to_sparse_bsc((2, 3)),
        "integers": torch.eye(3, dtype=torch.int64).to_sparse_csr(),
        "flags": (DENSE > 2).to_sparse(),
        "nothing": torch.zeros(3, 3).to_sparse(),
        "tensor": torch.quantize_per_tensor(DENSE, 0.1, 3, torch.quint8),
        "wide": torch.quantize_per_tensor(DENSE, 0.1, 0, torch.qint32),
        "turned": torch.quantize_per_tensor(DENSE, 0.1, 3, torch.quint8).t(),
        "row": torch.quantize_per_tensor(torch.ones(1000, 3), 0.1, 1, torch.qint8)[5],
        "channels": torch.quantize_per_channel(
            DENSE, SCALES, torch.zeros(8, dtype=torch.int64), 0, torch.qint8
        ),
        "float zeros": torch.quantize_per_channel(DENSE, SCALES, SCALES, 0, torch.quint8),
    }
