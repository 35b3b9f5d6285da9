"""How the sweep calls every public method of torch.Tensor: arguments, by rule where a rule will do."""

import torch

N = 24

OTHER = torch.linspace(0.1, 0.9, N * N).view(N, N)
ROW = torch.linspace(0.2, 0.8, N)
INDEX = torch.arange(N).flip(0)
INDICES = INDEX.repeat(N, 1)
MASK = OTHER > 0.5
BATCH = OTHER.view(1, N, N)

ARGUMENTS = {
    "addbmm": (BATCH, BATCH),
    "addcdiv": (OTHER, OTHER + 1),
    "addcmul": (OTHER, OTHER),
    "addmm": (OTHER, OTHER),
    "addmv": (OTHER, ROW),
    "addr": (ROW, ROW),
    "apply_": (lambda value: value + 1,),
    "as_strided": ((3, 3), (N, 1), 2),
    "as_strided_": ((N, N), (1, N)),
    "as_strided_scatter": (OTHER[:3, :3], (3, 3), (N, 1), 2),
    "as_subclass": (torch.Tensor,),
    "backward": (OTHER,),
    "broadcast_to": ((2, N, N),),
    "chunk": (2,),
    "cholesky_solve": (OTHER,),
    "cross": (OTHER,),
    "diagonal_scatter": (ROW,),
    "expand": (2, N, N),
    "fill_diagonal_": (0.5,),
    "flip": (0,),
    "gather": (1, INDICES),
    "index_add": (0, INDEX, OTHER),
    "index_copy": (0, INDEX, OTHER),
    "index_fill": (0, INDEX[:3], 0.5),
    "index_put": ((INDEX[:2], INDEX[:2]), torch.tensor(0.5)),
    "index_reduce": (0, INDEX, OTHER, "mean"),
    "index_select": (0, INDEX[:3]),
    "lerp": (OTHER, 0.25),
    "map_": (OTHER, lambda one, other: one * other),
    "masked_fill": (MASK, 0.5),
    "masked_scatter": (MASK, OTHER),
    "masked_select": (MASK,),
    "matrix_power": (2,),
    "moveaxis": (0, 1),
    "movedim": (0, 1),
    "multinomial": (2,),
    "mv": (ROW,),
    "mvlgamma": (1,),
    "narrow": (0, 1, 2),
    "narrow_copy": (0, 1, 2),
    "new_empty_strided": ((2, 3), (3, 1)),
    "new_full": ((2, 3), 0.5),
    "new_tensor": ([1.0, 2.0],),
    "normal_": (0.0, 0.02),
    "permute": (1, 0),
    "put": (INDEX[:3], ROW[:3]),
    "quantile": (0.5,),
    "nanquantile": (0.5,),
    "register_hook": (lambda grad: None,),
    "register_post_accumulate_grad_hook": (lambda parameter: None,),
    "renorm": (2, 0, 0.5),
    "repeat": (2, 1),
    "reshape": (-1,),
    "resize": (N, N),
    "resize_": (N - 1, N - 1),
    "resize_as_": (OTHER[:3],),
    "scatter": (1, INDICES, OTHER),
    "scatter_add": (1, INDICES, OTHER),
    "scatter_reduce": (1, INDICES, OTHER, "sum"),
    "select_scatter": (ROW, 0, 1),
    "set_": (OTHER.clone(),),
    "slice_scatter": (OTHER[:3], 0, 0, 3),
    "softmax": (-1,),
    "log_softmax": (-1,),
    "split": (5,),
    "split_with_sizes": ([5, N - 5],),
    "stft": (8, None, None, None, True, "reflect", False, True, True),
    "sum_to_size": (1, N),
    "swapaxes": (0, 1),
    "swapdims": (0, 1),
    "t_": (),
    "take": (INDEX,),
    "take_along_dim": (INDICES, 1),
    "tensor_split": (3,),
    "tile": (2, 1),
    "to": (torch.float64,),
    "topk": (3,),
    "transpose": (0, 1),
    "type": (torch.float64,),
    "type_as": (OTHER.double(),),
    "unflatten": (0, (2, N // 2)),
    "unfold": (0, 2, 1),
    "unsqueeze": (0,),
    "view": (-1,),
    "where": (MASK, OTHER),
    "__setitem__": (slice(0, 3), 0.5),
    "__getitem__": (slice(0, 3),),
    "__contains__": (0.5,),
    "__deepcopy__": ({},),
    "__format__": ("",),
    "__reduce_ex__": (2,),
    "__setattr__": ("note", 1),
}
TRIED = [(), (OTHER,), (0.5,), (1,), (0,), (2, 3), (0, 1), (BATCH,), (ROW,), (INDEX,), (MASK,)]
"""What is tried, in this order, for a method that stands in no table, as one that torch has yet to get."""

SPECIAL = [
    *("__abs__", "__add__", "__and__", "__array__", "__bool__", "__contains__", "__deepcopy__", "__eq__"),
    *("__float__", "__floordiv__", "__format__", "__ge__", "__getitem__", "__gt__", "__hash__", "__iadd__"),
    *("__imul__", "__index__", "__int__", "__invert__", "__ipow__", "__isub__", "__iter__", "__itruediv__"),
    *("__le__", "__len__", "__lt__", "__matmul__", "__mod__", "__mul__", "__ne__", "__neg__", "__pos__"),
    *("__pow__", "__radd__", "__reduce_ex__", "__repr__", "__reversed__", "__rmatmul__", "__rmul__"),
    *("__rpow__", "__rsub__", "__rtruediv__", "__setitem__", "__str__", "__sub__", "__truediv__"),
    "__dlpack__",
]

UNDEFINED = {"empty_like", "new", "new_empty", "new_empty_strided", "resize", "resize_as"}
"""Whose values are whatever memory held."""

ADDRESSES = {"data_ptr", "const_data_ptr", "__hash__", "__repr__", "__str__", "__format__", "output_nr"}
"""What says where a tensor lies, or how it is shown: the type of the answer is compared."""

LEFT_OUT = {
    "backward": "leaves a gradient: the surgery's training steps cover it",
    "volatile": "removed from torch: warns",
    "record_stream": "of CUDA",
    "module_load": "of swap_module_params, which replaces parameters",
    "__reduce_ex__": "pickling: in the surgery",
    "retain_grad": "nothing to see",
    "register_hook": "stays on the parameter",
    "register_post_accumulate_grad_hook": "stays on the parameter",
    "share_memory_": "in the surgery",
    "reinforce": "removed from torch",
}


def methods():
    """Return the public methods and attributes of torch.Tensor, and the operators."""
    public = [name for name in dir(torch.Tensor) if not name.startswith("_")]
    return [name for name in (*public, *SPECIAL) if name not in LEFT_OUT]


def arguments(name, base):
    """Return the arguments of a method, None for an attribute; the first of TRIED that torch takes."""
    known = ARGUMENTS.get(name, ARGUMENTS.get(name.removesuffix("_")))
    if known is not None:
        return known
    if not callable(getattr(torch.Tensor, name, None)):
        return None
    for given in TRIED:
        try:
            with torch.no_grad():
                getattr(torch.nn.Parameter(base.clone()), name)(*given)
        except Exception:  # noqa: S112, BLE001 - whatever torch says to wrong arguments
            continue
        return given
    return ()


def use(name, given):
    """Return a function of a parameter that calls a method of it, or reads an attribute."""

    def call(parameter):
        torch.default_generator.manual_seed(3)
        return getattr(parameter, name) if given is None else getattr(parameter, name)(*given)

    return call
