"""The command line: one small function per command, no logic."""

import typer

app = typer.Typer(rich_markup_mode=None, add_completion=False, no_args_is_help=True)


@app.callback()
def main() -> None:
    """How LLM inference is made fast, told as runnable code."""
