"""Makes pictures of every page, light and dark: `python -m tests.pages.pictures FOLDER`.

The pictures in docs/pictures are four of them.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from playwright.sync_api import sync_playwright

import keepstep as ks
from tests.pages import showcase
from tests.pages.conftest import CHROMIUM, serving

PAGES = (
    *("/", "/runs", "/runs?workflow=order", "/inbox", "/workflows", "/workflows/order", "/workflows/review", "/queues"),
    *("/services", "/schedules", "/agents", "/workers", "/doctor", "/runs/order-1042", "/runs/order-1043"),
    *("/runs/order-1042/graph", "/runs/order-1042/audit", "/runs/review-7", "/runs/review-7/graph"),
    *("/runs/review-7/state", "/runs/review-7/travel?at=5", "/runs/import-0611", "/compare?a=review-7&b=review-8"),
)


def populate(url: str) -> None:
    """Run the shop for a while, and kill a worker half-way."""
    line = [sys.executable, "-m", "keepstep", "--store", url, "worker", str(Path(showcase.__file__))]
    with ks.open(url, worker=False) as engine:
        for number in range(1030, 1042):
            engine.start("order", "Ada", ["lamp"], number - 990.0, run_id=f"order-{number}", tags={"team": "web"})
        engine.start("order", "Grace", ["desk", "chair", "lamp"], 410.0, run_id="order-1042", tags={"team": "web"})
        killed = subprocess.Popen(line, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        while engine.get("order-1042").run().seq < 5:
            time.sleep(0.01)
        killed.kill()
        killed.wait()
    with ks.open(url, workflows=[showcase.order, showcase.review, showcase.nightly_import]) as engine:
        engine.get("order-1042").result(60)
        for number in (1043, 1044):
            engine.start("order", "Linus", ["server"], 2400.0, run_id=f"order-{number}").reached("waiting")
        for name in ("review-7", "review-8"):
            engine.start(showcase.review, {}, run_id=name).result(60)
        for number in range(3):
            engine.start("nightly-import", ["customers", "invoices"], run_id=f"import-061{number}").reached("failed")


def main(folder: str) -> None:
    with tempfile.TemporaryDirectory() as place, sync_playwright() as playwright:
        url = f"sqlite:///{place}/shop.db"
        populate(url)
        worker = [sys.executable, "-m", "keepstep", "--store", url, "worker", str(Path(showcase.__file__))]
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"])
        driving = subprocess.Popen(worker, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            with serving(url, program=showcase.__file__) as address:
                for scheme in ("light", "dark"):
                    page = browser.new_page(color_scheme=scheme, viewport={"width": 1360, "height": 850})
                    for path in PAGES:
                        page.goto(address + path)
                        page.wait_for_timeout(600)  # until charts and timelines are drawn
                        name = re.sub(r"[^a-z0-9]+", "-", path.lower()).strip("-") or "overview"
                        page.screenshot(path=f"{folder}/{name}-{scheme}.png")
        finally:
            driving.kill()
            driving.wait()
            browser.close()


if __name__ == "__main__":
    main(sys.argv[1])
