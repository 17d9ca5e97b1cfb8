"""``siirl-dask report``: one file that tells of a run, or compares several, and in which no text
of a run can act.
"""

import re
import shutil
import subprocess
from html.parser import HTMLParser

import pytest
from siirl_storage import join, open_fs

from siirl_dask.cli import main
from siirl_dask.observe import Restart, Status
from tests.written_runs import (
    begin_run,
    end_run,
    save_rows,
    start_run,
    train_record,
    validation_record,
    whole_run,
    write_metrics,
)

NASTY = "\x1b[31m\"><script>alert(1)</script><img src=x onerror='alert(2)'> & </pre></svg>"
VOID = {"meta", "br"}
ALLOWED = """html head meta title style body h1 h2 h3 h4 nav a div p span dl dt dd figure figcaption table tr th td pre
code b i article details summary footer svg g rect line text polyline polygon circle defs marker path"""


class Page(HTMLParser):
    """The page as a browser sees it: every element closed, its texts, and what it refers to."""

    def __init__(self, content):
        super().__init__()
        self.open, self.texts, self.tags, self.links = [], [], set(), []
        self.feed(content)
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.add(tag)
        self.open += [] if tag in VOID else [tag]
        for name, value in attributes:
            assert not name.startswith("on"), f"<{tag}> has {name}"
            if name in ("href", "src", "xlink:href", "action"):
                self.links.append(value)

    def handle_startendtag(self, tag, attributes):
        self.handle_starttag(tag, attributes)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, text):
        self.texts.append(text)

    @property
    def text(self):
        return " ".join(" ".join(self.texts).split())


def report(to, *runs):
    main(["report", *map(str, runs), "-o", str(to)])
    fs, path = open_fs(str(to))
    content = fs.cat_file(path).decode()
    assert re.search(
        r"(https?:)?//", content.replace("http://www.w3.org", "")
    ) is None or "://" in "".join(map(str, runs))
    page = Page(content)
    assert page.tags <= set(ALLOWED.split())
    assert all(link.startswith("#") for link in page.links), page.links
    return content, page


def test_a_run_is_told_from_any_store_to_any_store(store_url, capsys):
    content, page = report(
        join(store_url, "report.html"), whole_run(join(store_url, "run"), traced=1)
    )
    for told in (
        "quickstart complete",
        "validation reward 0.46 → 0.91",
        "test reward 0.94",
        "Validations after step 0 and step 10. 1 prompt is in both",
        "Sort: 2 1 =",
        "Slowest is node rollout on worker 1 : 1.5 s a step",
        "rollout->old_logprobs 30 kB",
        "weights->load_weights 2 MB",
        "through scheduler and client, none of them rows 53 kB",
        "role policy on workers 2, 3",
        "elsewhere 1 to 10",
    ):
        assert told in page.text, told
    assert content.count("<svg") > 8
    assert "has the report" in capsys.readouterr().out


def test_no_text_of_a_run_acts_in_the_page(tmp_path):
    url = tmp_path / "run"
    begin_run(
        url, "run.name=named", "cluster.placement={}", "model.path='<script>alert(4)</script>'"
    )
    text = (url / "dag.json").read_text().replace('"old_logprobs"', '"<script>alert(3)</script>"')
    (url / "dag.json").write_text(text)
    write_metrics(
        url,
        [
            train_record(1, **{"<script>metric": 1.0}),
            validation_record(0, 0.5),
            validation_record(1, 1.0),
        ],
    )
    for step in (0, 1):
        save_rows(url, "validation", step, [(NASTY, NASTY, NASTY + str(step), float(step))] * 2)
    end_run(
        url, status=Status.FAILED, error=NASTY, restarts=[Restart(cause=NASTY, steps=3, workers=2)]
    )
    content, page = report(tmp_path / "report.html", url)
    assert "<script" not in content
    assert "<img" not in content
    assert "\x1b" not in content
    assert page.text.count("alert(1)") >= 5, "texts are shown as they are"
    assert "<script>metric" in page.text


def test_a_comparison_lists_the_keys_that_differ_and_no_others(tmp_path):
    one = whole_run(tmp_path / "one", "run.name=one", "trainer.lr=1e-5")
    two = whole_run(
        tmp_path / "two", "run.name=two", "trainer.lr=5e-5", "algorithm.minibatches=2", steps=20
    )
    content, page = report(tmp_path / "report.html", one, two)
    table = content.split('id="configuration"')[1].split("</table>")[0]
    assert re.findall(r"<code>(.*?)</code>", table) == [
        "run.name",
        "run.url",
        "algorithm.minibatches",
        "trainer.lr",
    ]
    assert '<td class="left">1e-05</td><td class="left">5e-05</td>' in table
    assert "changes of the DAG from one to two" in page.text
    assert content.count('class="r0" points') == content.count('class="r1" points') > 5, (
        "a curve of each run"
    )


def test_runs_of_one_name_are_told_apart_by_their_folders(tmp_path):
    _, page = report(tmp_path / "r.html", whole_run(tmp_path / "a"), whole_run(tmp_path / "b"))
    assert page.text.startswith("a, b")
    assert "quickstart" not in page.text.partition("Curves")[0]
    (tmp_path / "x").mkdir()
    others = whole_run(tmp_path / "x" / "a")
    _, page = report(tmp_path / "s.html", str(tmp_path / "a"), others)
    assert page.text.startswith(f"{tmp_path.name}/a, x/a")


def test_how_a_run_went_on_is_told(tmp_path):
    url = tmp_path / "run"
    begin_run(url)
    write_metrics(url, [train_record(step) for step in range(1, 8)], [1, 1, 1, 2, 2, 4, 4])
    for number in (1, 2, 3, 4):
        start_run(url, number)
    lost = Restart(
        cause="worker '1' left the cluster",
        steps=3,
        silence=0.4,
        seconds=1.3,
        steps_again=1,
        workers=3,
    )
    end_run(url, status=Status.FAILED, error="node 'reward' raised", restarts=[lost])
    _, page = report(tmp_path / "report.html", url)
    for told in (
        "quickstart failed",
        "node 'reward' raised",
        "worker '1' left the cluster 3 0.4 s 1.3 s 1 3",
        "1 2026-11-23 07:20:05 UTC elsewhere 1 to 3 2 2026",
        "elsewhere 4 to 5 3 2026-11-23 07:20:05 UTC elsewhere none 4 2026",
    ):
        assert told in page.text, told


def test_ten_thousand_steps_make_a_small_file_in_which_no_spike_is_hidden(tmp_path):
    runs = []
    for name, steps in {"one": 10_000, "two": 100}.items():
        begin_run(tmp_path / name, f"run.name={name}", "run.steps=10000")
        records = [
            train_record(step, **{"policy/grad_norm": step % 7 / 7}) for step in range(1, steps + 1)
        ]
        records[steps // 3]["metrics"]["policy/grad_norm"] = 1234.5
        write_metrics(tmp_path / name, records)
        runs.append(tmp_path / name)
    content, _ = report(tmp_path / "report.html", *runs)
    assert len(content) < 500_000
    norms = content.split("<span>gradient norm</span>")[1].split("</figure>")[0]
    assert re.search(r"one, \S+ to 1,23[45]", norms)
    assert 'class="band r0"' in norms


def test_what_cannot_be_read_is_said_and_the_rest_is_told(tmp_path, capsys):
    url = tmp_path / "run"
    begin_run(url)
    _, page = report(tmp_path / "report.html", url)
    assert "no end recorded" in page.text
    assert "No metrics were logged." in page.text
    said = capsys.readouterr().out
    for part in ("metrics", "summary", "trace", "samples"):
        assert f"without the {part} of quickstart: " in said
    (url / "config.yaml").write_text("run: {nonsense: 1}\n")
    (url / "metrics.jsonl").write_text("no JSON\n")
    (url / "dag.json").write_text(
        '{"roles": [], "nodes": [1, {"name": 2, "after": 3, "role": []}]}'
    )
    _, page = report(tmp_path / "report.html", url)
    assert "Another version of siirl_dask wrote this run" in page.text
    assert "line 1: not JSON" in page.text


def test_without_validations_the_best_and_worst_samples_of_the_last_step_are_shown(tmp_path):
    url = tmp_path / "run"
    begin_run(url)
    save_rows(
        url, "rollouts", 3, [(f"Sort: {at} =", "1", f"reply {at}", at / 4) for at in range(4)]
    )
    _, page = report(tmp_path / "report.html", url)
    assert re.search(
        r"best: step 3, reward 0.75.*reply 3.*worst: step 3, reward 0\D.*reply 0", page.text
    )


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["{run}", "{run}"], "is given twice"),
        (["{run}", "{run}/none"], "run/none' holds no run"),
        (
            ["{run}", "-o", "/proc/none/report.html"],
            "-o '/proc/none/report.html': the report cannot be written",
        ),
        (["s4://bucket/run"], "Protocol not known: s4"),
        (["{run}", *(f"run{number}" for number in range(16))], "17 runs: expected at most 16"),
        (["{run}", "--outputs", "x"], "unrecognized arguments: --outputs x"),
    ],
)
def test_what_cannot_be_reported_is_refused_and_nothing_is_written(
    tmp_path, monkeypatch, capsys, arguments, said
):
    monkeypatch.chdir(tmp_path)
    begin_run(tmp_path / "run")
    with pytest.raises(SystemExit) as ended:
        main(["report", *(text.format(run=tmp_path / "run") for text in arguments)])
    assert ended.value.code == 2
    assert said in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_phase_of_one_step_and_values_of_any_size_are_drawn(tmp_path):
    values = {"a": 1e308, "b": -1e308, "c": 5e-324, "d": 0.0, "e": None}
    runs = []
    for name, steps in {"one": (1,), "two": (1, 2, 3)}.items():
        begin_run(tmp_path / name, f"run.name={name}")
        records = [
            train_record(step, **{key: value and value / step for key, value in values.items()})
            for step in steps
        ]
        records[-1]["metrics"]["a"] = -1e308
        write_metrics(tmp_path / name, [*records, validation_record(0, 0.5)])
        runs.append(tmp_path / name)
    content, _ = report(tmp_path / "report.html", *runs)
    assert not re.search(r'="[^"]*\b(nan|inf)\b', content)


@pytest.mark.slow
def test_a_browser_shows_the_page_without_a_complaint(tmp_path):
    """Chromium builds the page: curves have points, the policy of the page is obeyed, and the
    console stays empty.
    """
    browser = (
        shutil.which("chromium")
        or shutil.which("chromium-browser")
        or shutil.which("google-chrome")
    )
    if browser is None:
        pytest.skip("no Chromium is installed")
    runs = [whole_run(tmp_path / name, f"run.name={name}") for name in ("one", "two")]
    report(tmp_path / "report.html", *runs)
    flags = [
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--enable-logging=stderr",
        "--v=0",
        "--virtual-time-budget=2000",
    ]
    address = f"file://{tmp_path}/report.html"
    command = [browser, *flags, f"--user-data-dir={tmp_path}/profile", "--window-size=1280,900"]
    shown = subprocess.run(
        [*command, "--dump-dom", address], capture_output=True, text=True, timeout=100, check=True
    )
    assert "CONSOLE" not in shown.stderr
    assert shown.stdout.count("<polyline") > 10
    assert "Slowest is node" in shown.stdout
    picture = tmp_path / "page.png"
    subprocess.run(
        [*command, f"--screenshot={picture}", address], capture_output=True, timeout=100, check=True
    )
    assert len(set(picture.read_bytes())) > 100
    assert picture.stat().st_size > 20_000
