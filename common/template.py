"""A chat template rendered at arm's length: it is a program that came inside a model file.

Jinja's sandbox keeps it from Python, but not from looping for ever or filling memory. So it runs in a short-lived
process of its own, with a ceiling on its time, its memory and its output. This file is both sides of that.
"""

import contextlib
import json
import subprocess
import sys

MAX_TEMPLATE = 1 << 17  # characters; templates in use have 100 to 20,000
MAX_OUTPUT = 1 << 22  # characters, a hundred times the longest context in use
MAX_RANGE = 10_000  # steps of one range(); templates count messages and tools
MAX_SECONDS = 5  # a template in use takes under 0.01 s, the process itself about 0.2 s
MAX_MEMORY = 1 << 29  # bytes of address space, of which Python with Jinja takes about 50 MB


class TemplateFailure(ValueError):
    """The template can't be rendered; the message says why, without a full stop."""


def render(template: str, variables: dict) -> str:
    """The text of `template` for JSON-like `variables`. Raises TemplateFailure."""
    if len(template) > MAX_TEMPLATE:
        raise TemplateFailure(f"it is {len(template)} characters long; {MAX_TEMPLATE} is the limit")
    job = json.dumps({"template": template, "variables": variables})
    command = [sys.executable, "-P", __file__]  # -P: this folder's module names must not hide the standard library's
    try:
        done = subprocess.run(command, input=job.encode(), capture_output=True, timeout=MAX_SECONDS)
    except subprocess.TimeoutExpired:
        raise TemplateFailure(f"it was still running after {MAX_SECONDS} seconds") from None
    try:
        result = json.loads(done.stdout)
    except ValueError:
        raise TemplateFailure(f"its process ended early with exit status {done.returncode}") from None
    if "error" in result:
        raise TemplateFailure(result["error"])
    return result["text"]


def limit_process() -> None:
    """Ceilings that the system itself keeps, where it has them (Windows leaves the parent's timeout alone)."""
    try:
        import resource
    except ImportError:
        return
    for what, limit in ((resource.RLIMIT_CPU, MAX_SECONDS + 1), (resource.RLIMIT_AS, MAX_MEMORY)):
        with contextlib.suppress(OSError, ValueError):  # a lower ceiling is already in force, or this system has none
            resource.setrlimit(what, (limit, limit))


def render_here(template: str, variables: dict) -> str:
    """`template` rendered in this process, with the names that chat templates in use expect."""
    import jinja2
    import jinja2.sandbox

    def bounded_range(*args):
        steps = range(*args)
        if len(steps) > MAX_RANGE:
            raise jinja2.TemplateError(f"range() of {len(steps)} steps; {MAX_RANGE} is the limit")
        return steps

    def raise_exception(message):
        raise jinja2.TemplateError(str(message))

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
    )
    environment.globals.update(range=bounded_range, raise_exception=raise_exception)
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    chunks, size = [], 0
    for chunk in environment.from_string(template).generate(variables):
        chunks.append(chunk)
        size += len(chunk)
        if size > MAX_OUTPUT:
            raise jinja2.TemplateError(f"more than {MAX_OUTPUT} characters of output")
    return "".join(chunks)


def main() -> None:
    job = json.load(sys.stdin.buffer)
    limit_process()
    try:
        result = {"text": render_here(job["template"], job["variables"])}
    except MemoryError:
        result = {"error": f"it needs more than {MAX_MEMORY >> 20} MiB of memory"}
    except Exception as error:  # whatever a template can raise is the template's failure
        result = {"error": " ".join(str(error).split())[:300] or type(error).__name__}
    sys.stdout.write(json.dumps(result))  # ASCII, so the terminal's encoding plays no part


if __name__ == "__main__":
    main()
