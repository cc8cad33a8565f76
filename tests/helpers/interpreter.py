"""Triton's interpreter, quicker: what it computes anew in every operation and nobody reads is computed once."""

from dataclasses import replace
from functools import cache


def quicken() -> None:
    """For kernels of this process. Every result stays the same, bit for bit."""
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # of other versions
        return
    patch_language_once_per_launch(interpreter)
    leave_out_overflow_checks(interpreter.interpreter_builder)
    remember_types(interpreter)


def patch_language_once_per_launch(interpreter) -> None:
    """Triton's interpreter replaces the functions of its language when a kernel begins, and again at each call of a
    device function, although they are replaced already: a third of the time of our kernels. Here only once."""
    import triton.language as tl

    patch, patched = interpreter._patch_lang, set()

    @cache
    def languages(function):
        return {module.__name__ for module in (tl, tl.core) if module in function.__globals__.values()}

    def patch_once(function):
        if languages(function) <= patched:
            return None
        scope, begins = patch(function), not patched
        patched.update(languages(function))
        if begins:  # a kernel; what its device functions replace is never restored, here as in Triton
            restore = scope.restore
            scope.restore = lambda: (patched.clear(), restore())
        return scope

    interpreter._patch_lang = patch_once


def leave_out_overflow_checks(builder) -> None:
    """Every sum and product of integers is computed a second time, in int64, and compared with two bounds, for an
    assertion that is left out unless debugging: a third of what remains."""
    if not builder.options.debug:
        builder.options = replace(builder.options, sanitize_overflow=False)


def remember_types(interpreter) -> None:
    """The shape of each result is checked, wrapped twice and printed, and a table of all types is built to look up
    one of them."""
    import triton.language as tl

    numpy_type, numpy_types = interpreter._get_np_dtype, {}

    def known_numpy_type(type):
        found = numpy_types.get(type.name)
        if found is None:
            found = numpy_types[type.name] = numpy_type(type)
        return found

    interpreter._get_np_dtype = known_numpy_type
    make_type, make_tensor, shapes = tl.block_type.__init__, tl.tensor.__init__, {}

    def init_type(self, element_ty, shape):
        key = tuple([getattr(size, "value", size) for size in shape])
        if key not in shapes:
            make_type(self, element_ty, shape)
            tensor = object.__new__(tl.tensor)
            make_tensor(tensor, None, self)
            shapes[key] = self.shape, self.numel, str(self.shape), (tensor.shape, tensor.numel)
        self.element_ty = element_ty
        self.shape, self.numel, text, self.of_tensors = shapes[key]
        self.name = f"<{text}, {element_ty}>"

    def init_tensor(self, handle, type):
        if not type.is_block():
            return make_tensor(self, handle, type)
        self.handle, self.type, self.dtype = handle, type, type.element_ty
        self.shape, self.numel = type.of_tensors
        return None

    tl.block_type.__init__, tl.tensor.__init__ = init_type, init_tensor
