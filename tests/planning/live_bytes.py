"""Counts the bytes of tensors that are alive, on any device: what the allocator of a GPU would have handed out."""

import weakref

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class LiveBytes(TorchDispatchMode):
    """
    While active, counts every storage that an operation creates, until it is freed.

    Attributes:
        now, peak: bytes alive now, and the most that were; set `peak` to 0 to start anew.
    """

    def __init__(self, existing):
        super().__init__()
        self.now = self.peak = 0
        self._seen = {tensor.untyped_storage()._cdata for tensor in existing}  # these do not count

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._seen:
                    self._seen.add(storage._cdata)
                    self.now += storage.nbytes()
                    weakref.finalize(storage, self._freed, storage._cdata, storage.nbytes())
        self.peak = max(self.peak, self.now)
        return result

    def _freed(self, key, size):
        self._seen.remove(key)
        self.now -= size
