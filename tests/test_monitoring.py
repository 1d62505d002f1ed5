"""The dashboard and the alert rules that we ship, against what a daemon shows."""

import json
import re
import shutil
import subprocess
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import pytest
import yaml
from fake_driver import LIMITS, PATIENCE
from fakes import FakeEngine, FakeTokenizer
from prometheus_client.parser import text_string_to_metric_families
from rich.console import Console
from test_daemon import send_signal

from driver.metrics.driver_metrics import DriverMetrics
from driver.odriver import oDriver
from engine.config import EngineConfig
from engine.exit_codes import STOPPED
from engine.metrics.engine_stats import EngineStats
from ipc.client import Client
from ipc.errors import RequestFailed
from ipc.service.configuration import DaemonConfig, LiveConfiguration
from ipc.service.daemon import Daemon
from ipc.service.http_config import HttpConfig
from ipc.service.start_up import Loaded
from ipc.wire.messages import PROGRESS_LIMIT
from scripts.documents.pages import PAGES

MONITORING = Path(__file__).parent.parent / "docs" / "monitoring"
DASHBOARD = json.loads((MONITORING / "grafana.json").read_text())
RULES = [rule for group in yaml.safe_load((MONITORING / "alerts.yml").read_text())["groups"] for rule in group["rules"]]
OF_PROMETHEUS = {"instance", "job", "le"}
"""Labels that a scrape adds, and the one of buckets."""


class BusyEngine(FakeEngine):
    """Has preempted, accepted a draft and slots for adapters: what they count is shown from then on."""

    def stats(self) -> EngineStats:
        return msgspec.structs.replace(
            super().stats(), preemptions_by_cause={"pages": 1}, num_accepted_tokens_per_pos=(1,), max_loras=1
        )


def scraped(address: str) -> dict[str, set[str]]:
    """The labels of each sample that a daemon shows, by its name, once a request was refused."""

    def load(
        config: EngineConfig, report: Callable[..., None], on_failure: Callable[[str], None], *others: object
    ) -> Loaded:
        del config, report, others
        driver = oDriver(BusyEngine(), FakeTokenizer(), on_failure=on_failure)
        return Loaded(driver, "parrot", LIMITS, {}, DriverMetrics(driver, "parrot", {}))

    def talk() -> str:
        try:
            with Client(address, PATIENCE) as client:
                with pytest.raises(RequestFailed):
                    client.complete("x", top_p=7)
                return client.metrics()
        finally:
            send_signal()

    console = Console(stderr=True)
    with ThreadPoolExecutor(1) as thread:
        text = thread.submit(talk)
        settings = EngineConfig(), DaemonConfig(bind=address), HttpConfig()
        assert Daemon(LiveConfiguration(lambda: settings, console), console, load).run() == STOPPED
    found: dict[str, set[str]] = {"up": set()}
    for family in text_string_to_metric_families(text.result()):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def test_every_metric_of_dashboard_and_alerts_is_one_that_a_daemon_shows(address: str) -> None:
    """With the labels by which it is selected, summed and named."""
    known = scraped(address)
    panels = [target for panel in DASHBOARD["panels"] for target in panel.get("targets", [])]
    queries = [(target["expr"], target["legendFormat"]) for target in panels] + [(rule["expr"], "") for rule in RULES]

    for query, legend in queries:
        names = set(re.findall(r"\b(?:up|(?:vllm:|odriver_|process_)\w+)\b", query))
        assert names and names <= known.keys(), f"{query}: {names - known.keys()}"
        selected = set(re.findall(r"(\w+)=~?\"", query)) | set(re.findall(r"\{\{(\w+)\}\}", legend))
        summed = {label.strip() for labels in re.findall(r"by \(([^)]*)\)", query) for label in labels.split(",")}
        labels = set().union(*(known[name] for name in names)) | OF_PROMETHEUS
        assert selected | summed <= labels, f"{query}: {(selected | summed) - labels}"
    assert len(panels) > 30 and len(RULES) > 10


def test_every_metric_that_a_page_names_is_one_that_a_daemon_shows(address: str) -> None:
    """As a query has to name it: with a counter's ending, and without those of a histogram's parts."""
    known = {re.sub("_bucket$", "", name) for name in scraped(address)}

    for page in PAGES:
        names = set(re.findall(r"`((?:vllm:|odriver_)\w+)`", page.read_text(encoding="utf-8")))
        assert names <= known, f"{page.name}: {names - known}"


def test_the_dashboard_is_one_that_grafana_takes() -> None:
    """Panels have ids of their own and do not overlap, and each asks the data source that is chosen."""
    panels: list[dict[str, Any]] = DASHBOARD["panels"]
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]

    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len(set(cells)) == len(cells) and max(x for x, _ in cells) < 24
    assert {panel["datasource"]["uid"] for panel in panels if panel["type"] != "row"} == {"${datasource}"}
    assert {variable["name"] for variable in DASHBOARD["templating"]["list"]} == {"datasource", "model"}


def test_every_alert_says_what_is_wrong_and_what_to_do() -> None:
    """Its parts are those that Prometheus knows."""
    for rule in RULES:
        assert rule.keys() <= {"alert", "expr", "for", "labels", "annotations"}, rule
        assert rule["labels"]["severity"] in ("critical", "warning", "info")
        assert rule["annotations"].keys() == {"summary", "description"}
    assert len({rule["alert"] for rule in RULES}) == len(RULES)


def test_a_stall_is_an_alert_before_the_watchdog_ends_it() -> None:
    """With an interval for the scrape and one for the evaluation, of 15 s each."""
    (rule,) = (rule for rule in RULES if rule["alert"] == "OdriverStalled")

    threshold, held = int(rule["expr"].rpartition(" > ")[2]), int(rule["for"].removesuffix("s"))
    assert threshold + held + 2 * 15 <= PROGRESS_LIMIT


@pytest.mark.skipif(shutil.which("promtool") is None, reason="there is no promtool")
def test_promtool_accepts_the_alerts() -> None:
    """Prometheus's own check of a file of rules."""
    checked = subprocess.run(
        ["promtool", "check", "rules", str(MONITORING / "alerts.yml")], capture_output=True, text=True
    )

    assert checked.returncode == 0, checked.stdout + checked.stderr
