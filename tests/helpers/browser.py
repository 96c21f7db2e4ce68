"""A headless Chromium, for tests of pages with scripts."""

import html
import json
import os
import re
import shutil
import subprocess

import pytest


def chromium():
    """The browser's path. Without a browser, a test is skipped, or fails if CI=true."""
    names = ("chromium", "chromium-browser", "google-chrome")
    found = next(filter(None, map(shutil.which, names)), None)
    if found is None:
        give_up = pytest.fail if os.environ.get("CI") == "true" else pytest.skip
        give_up("no Chromium on PATH")
    return found


def browse(page, folder, script):
    """Runs a script at the end of a page, and returns its result and the console's lines.

    Args:
      page: The text of the page.
      folder: A directory for the page and the browser's profile.
      script: The body of an async function, which returns what JSON can hold.
    """
    run = f"""<script>(async () => {{
      const result = await (async () => {{ {script} }})()
      const pre = document.createElement("pre")
      pre.id = "results"
      pre.textContent = JSON.stringify(result)
      document.body.append(pre)
    }})()</script>"""
    head, _, tail = page.rpartition("</body>")
    file = folder / "browsed.html"
    file.write_text(head + run + "</body>" + tail)
    command = [
        chromium(), "--headless", "--no-sandbox", "--disable-gpu", "--enable-logging=stderr",
        "--window-size=1000,900", f"--user-data-dir={folder / 'browser'}",
        "--virtual-time-budget=60000", "--dump-dom", file.as_uri(),
    ]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    said = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    results = re.search(r'<pre id="results">(.*?)</pre>', done.stdout, re.S)
    assert results, said
    return json.loads(html.unescape(results[1])), said
