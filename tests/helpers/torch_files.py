"""Files in the layout of PyTorch's, made without it."""

import collections
import io
import pickle
import sys
import types
import zipfile

import ml_dtypes
import numpy as np

KINDS = {
    **{"Float": np.float32, "Double": np.float64, "Half": np.float16, "Long": np.int64},
    **{"BFloat16": ml_dtypes.bfloat16, "Int": np.int32, "Short": np.int16, "Char": np.int8},
    **{"Byte": np.uint8, "Bool": np.bool_, "ComplexFloat": np.complex64},
}


class Storage:
    """Entries under a key, as PyTorch's persistent ids name them."""

    def __init__(self, key, kind, array):
        self.key, self.kind, self.array = key, kind, array


class Call:
    """Pickles as `function(*args)`."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


class FakeTorch:
    """Modules of PyTorch's names while a pickle is written; nothing of it is read back."""

    def __init__(self, monkeypatch):
        torch, utils = types.ModuleType("torch"), types.ModuleType("torch._utils")
        storage = types.ModuleType("torch.storage")
        for kind in KINDS:
            name = f"{kind}Storage"
            setattr(torch, name, type(name, (), {"__module__": "torch"}))
        storage.UntypedStorage = type("UntypedStorage", (), {"__module__": "torch.storage"})
        for name in ("_rebuild_tensor_v2", "_rebuild_tensor_v3", "_rebuild_parameter"):
            function = types.FunctionType((lambda *args: None).__code__, {}, name)
            function.__module__, function.__qualname__ = "torch._utils", name
            setattr(utils, name, function)
        torch.Size = type("Size", (tuple,), {"__module__": "torch"})
        for module in (torch, utils, storage):
            monkeypatch.setitem(sys.modules, module.__name__, module)
        self.torch, self.utils, self.storage = torch, utils, storage

    def tensor(self, storage, shape, strides=None, offset=0):
        if strides is None:
            strides = tuple(int(np.prod(shape[i + 1 :])) for i in range(len(shape)))
        hooks = collections.OrderedDict()
        rebuild = self.utils._rebuild_tensor_v2
        return Call(rebuild, storage, offset, tuple(shape), tuple(strides), False, hooks)

    def pickled(self, tree, protocol=2):
        out, torch = io.BytesIO(), self.torch

        class Pickler(pickle.Pickler):
            def persistent_id(self, obj):
                if isinstance(obj, Storage):
                    kind = getattr(torch, f"{obj.kind}Storage", obj.kind)
                    return "storage", kind, obj.key, "cpu", obj.array.size
                return None

        Pickler(out, protocol).dump(tree)
        return out.getvalue()

    def save(self, path, tree, storages, compression=zipfile.ZIP_STORED, protocol=2, **members):
        archive(path, self.pickled(tree, protocol), storages, compression, **members)


def archive(path, data, storages=(), compression=zipfile.ZIP_STORED, **members):
    with zipfile.ZipFile(path, "w", compression) as file:
        file.writestr("archive/data.pkl", data)
        for storage in storages:
            file.writestr(f"archive/data/{storage.key}", storage.array.tobytes())
        for name, text in {"version": "3\n", "byteorder": "little", **members}.items():
            file.writestr(f"archive/{name}", text)
