"""Models that several test files share, made or fetched once."""

import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from common import sources, synth
from common.team import confine, granted

BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome", "msedge",
            "/Applications/Google Chrome.app/Contents/MacOS/Google Chrome")  # fmt: skip


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    """A test that needs no optional hardware or peer may not pass by skipping."""
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and not any(map(item.get_closest_marker, ("gpu", "peers"))):
        report.outcome, report.longrepr = "failed", f"skipped outside the gpu and peers marks: {report.longrepr}"
    return report


@pytest.fixture(autouse=True)
def all_cores():
    """A test that measures in this process leaves it on fewer cores; the next one starts with all."""
    before = granted()
    yield
    confine(before)


@pytest.fixture(scope="session")
def browser():
    """Headless Chromium: the system's, or the one that `playwright install chromium` fetches."""
    from playwright.sync_api import sync_playwright  # not on a machine that is there for its GPU

    options = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
    with sync_playwright() as tool:
        path = next(filter(None, map(shutil.which, BROWSERS)), tool.chromium.executable_path)
        assert Path(path).exists(), (
            "the page is tested in a browser: `.venv/bin/playwright install chromium` fetches one"
        )
        with tool.chromium.launch(executable_path=path, args=options) as browser:
            yield browser


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The real SmolLM2 file, fetched into the user cache on first need."""
    return sources.resolve("smollm2")


@pytest.fixture(scope="session")
def tiny_of(tmp_path_factory) -> Callable[[str], Path]:
    """tiny_of("q5_k") is a random two-layer llama model of that quantization, made once."""
    folder = tmp_path_factory.mktemp("tiny")
    return cache(lambda quant: synth.synth("tiny", quant, folder / f"tiny-{quant}.gguf"))


@pytest.fixture(scope="session")
def tiny(tiny_of) -> Path:
    """The random two-layer model in the mix of Q4_K and Q6_K that most files have."""
    return tiny_of("q4_k_m")
