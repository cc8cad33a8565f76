"""A page inside a notebook."""

import html


def framed(page: str, height: int = 720) -> str:
    """The page in a sandboxed frame: its script has no access to the notebook."""
    style = f"width:100%;height:{height}px;border:0"
    return (
        f'<iframe srcdoc="{html.escape(page, quote=True)}" sandbox="allow-scripts" style="{style}"></iframe>'
    )
