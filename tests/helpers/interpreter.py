"""Triton's interpreter, quicker."""

from functools import cache


def patch_language_once_per_launch() -> None:
    """Triton's interpreter replaces the functions of its language when a kernel begins, and again at each call of a
    device function, although they are replaced already: a third of the time of our kernels. Here only once."""
    import triton.language as tl
    from triton.runtime import interpreter

    if not hasattr(interpreter, "_LangPatchScope"):  # of other versions
        return
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
