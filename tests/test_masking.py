"""A password or a key in an address opens it, and is in nothing that a command says or leaves."""

import base64
import logging
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest

from openkto.commands import report
from openkto.commands.run import run
from openkto.config import eval_sets, shown_settings, to_yaml
from openkto.config.flags import parse
from openkto.data.holdout import read_split
from openkto.data.problems import shorten
from openkto.data.remote import local_copies
from openkto.errors import ConfigError, DataError
from openkto.masking import is_masked, masked, masked_for, masked_value, name_of_address
from openkto.pages.run_files import read_run
from tests.helpers.commands import run_to_status
from tests.pages.made_runs import start, train_line, write_run
from tests.ranks import run_ranks

USER, PASSWORD, SIGNATURE = "jane-of-sales", "pa55w0rd", "5igned/By=Us"
SECRETS = (USER, PASSWORD, SIGNATURE, base64.b64encode(f"{USER}:{PASSWORD}".encode()).decode())

ADDRESSES = {
    "https://me:pw@host:8080/x.csv?X-Amz-Date=2026&X-Amz-Signature=ab12": (
        "https://***@host:8080/x.csv?X-Amz-Date=***&X-Amz-Signature=***",
        "https://host:8080/x.csv",
    ),
    "https://token@host/x.csv#access_token=t": ("https://***@host/x.csv#access_token=***", "https://host/x.csv"),
    "https://me:p@w@host/x.csv?bare/key": ("https://***@host/x.csv?***", "https://host/x.csv"),
    "s3://KEY:SEC/RET@bucket/x.csv": ("s3://***@bucket/x.csv", "s3://bucket/x.csv"),
    "zip://x.csv::s3://key:secret@bucket/all.zip": ("zip://x.csv::s3://***@bucket/all.zip",) * 2,
    "abfs://box@account.dfs/x.csv?sig=a%2Fb": ("abfs://box@account.dfs/x.csv?sig=***",) * 2,
}
HARMLESS = (
    "hf://datasets/owner/name@main/x.csv",
    "https://host:8080/a@b/x.csv?download=true&raw=1",
    "http://[::1]:80/a@b.csv",
    "s3://bucket/year=202?/month=01/rows-?.csv",
    "/home/me@work/rows.csv?a=b",
    "rows-?.jsonl",
)


@pytest.mark.parametrize("address", ADDRESSES)
def test_user_and_query_of_an_address_are_masked_wherever_it_stands(address):
    shown, name = ADDRESSES[address]
    assert masked(f"{address}: must be there; got '{address}', {address}.") == (
        f"{shown}: must be there; got '{shown}', {shown}."
    )
    assert masked(shown) == shown
    assert is_masked(shown)
    assert name_of_address(address) == name.replace("***@", "").replace("?sig=***", "?sig=a%2Fb")


@pytest.mark.parametrize("text", HARMLESS)
def test_what_opens_nothing_stays(text):
    assert masked(text) == text
    assert not is_masked(text)


def test_a_quote_in_a_password_or_a_key_does_not_end_the_address():
    assert masked("got 'https://me:p'w@host/x.csv'.") == "got 'https://***@host/x.csv'."
    assert masked_value("held=https://me:p'w@host/x.csv?sig=a'b") == "held=https://***@host/x.csv?sig=***"
    entry = '{"path": "https://me:pw@host/x.csv?sig=ab", "label_key": "a?b=c"}'
    assert masked_value([entry, 7]) == ['{"path": "https://***@host/x.csv?sig=***", "label_key": "a?b=c"}', 7]


def test_a_key_of_the_hub_is_masked():
    key = "hf_" + "abcdefgh" * 4 + "ij"
    assert masked(f"--push_to_hub: got {key}.") == "--push_to_hub: got ***."
    assert masked("hf_transfer and hf_model_of_mine") == "hf_transfer and hf_model_of_mine"


def test_what_a_library_says_of_a_part_of_an_address_is_masked():
    address = f"s3://{USER}:{PASSWORD}@bucket/x.csv?sig={SIGNATURE}"
    assert masked_for(address, f'bad bucket "{USER}:{PASSWORD}@bucket", {PASSWORD}, {SIGNATURE}') == (
        'bad bucket "***@bucket", ***, ***'
    )


def test_a_long_address_is_masked_before_it_is_cut():
    """Of one that ends within its password nobody could tell."""
    address = f"https://{USER}:{PASSWORD * 30}@host/x.csv"
    assert PASSWORD not in shorten(address, 60)
    with pytest.raises(ConfigError) as caught:
        parse(["--pretrain", "m", "--dataset", "rows.jsonl", "--on_bad_rows", address], "train")
    assert PASSWORD not in str(caught.value)


# ---- settings --------------------------------------------------------------------------------------------------------

ADDRESS = f"https://{USER}:{PASSWORD}@host/rows.jsonl?sig={SIGNATURE},2"
FLAGS = ["--pretrain", "m", "--dataset", "a.jsonl", ADDRESS, "--eval_dataset", f"held={ADDRESS}"]


def test_the_run_file_has_no_key_and_says_that_it_must_be_given_again(tmp_path):
    config, _ = parse(FLAGS, "train")
    assert config.data.dataset == ["a.jsonl", ADDRESS]  # a comma of a query does not split it
    text = to_yaml(config)
    assert not [secret for secret in SECRETS if secret in text]
    assert shown_settings(config)["dataset"] == ["a.jsonl", "https://***@host/rows.jsonl?sig=***"]
    file = tmp_path / "run.yaml"
    file.write_text(text)
    with pytest.raises(ConfigError) as caught:
        parse(["--config", str(file)], "train")
    assert str(caught.value) == (
        f"{file}: dataset: must be a whole address; got 'https://***@host/rows.jsonl?sig=***', whose password or "
        "key was left out when it was written down. Give --dataset again, with the whole address."
    )
    again, _ = parse(["--config", str(file), *FLAGS[2:]], "train")
    assert again == config


def test_several_addresses_with_queries_may_stand_behind_one_comma():
    config, _ = parse(["--pretrain", "m", "--dataset", "https://h/a.csv?k=1,https://h/b.csv?k=2"], "train")
    assert config.data.dataset == ["https://h/a.csv?k=1", "https://h/b.csv?k=2"]
    config, _ = parse([*FLAGS[:4], "--eval_dataset", "one=https://h/a.csv?k=1,two=https://h/b.csv?k=2"], "train")
    assert list(eval_sets(config.data)) == ["one", "two"]


def test_a_run_file_with_whole_addresses_is_shown_without_keys(tmp_path):
    """Somebody wrote it, or an earlier version."""
    folder = write_run(tmp_path / "run", [start(), train_line(1)], f"dataset: ['{ADDRESS}']\npretrain: m\n")
    assert read_run(folder).settings["dataset"] == ["https://***@host/rows.jsonl?sig=***"]


# ---- what a command says ---------------------------------------------------------------------------------------------


def test_neither_errors_nor_tracebacks_nor_libraries_say_a_key(capsys, monkeypatch):
    monkeypatch.setattr(logging.getLogger(), "handlers", [])

    def fails(argv: list[str]) -> None:
        logging.getLogger("some.library").warning("cannot read %s", ADDRESS)
        raise {"ours": ConfigError, "theirs": ValueError}[argv[0]](f"no {ADDRESS}")

    for argv in (["ours"], ["theirs"], ["ours", "--debug"], ["theirs", "--debug"]):
        run(fails, argv)
        said = capsys.readouterr().err
        assert not [secret for secret in SECRETS if secret in said], said
        assert said.count("https://***@host/rows.jsonl?sig=***") >= 2


def test_trackers_that_look_at_the_command_line_see_it_without_keys(monkeypatch):
    seen = []
    monkeypatch.setattr(sys, "argv", ["openkto", "train", "--dataset", ADDRESS])
    run(lambda argv: seen.append((argv[2], sys.argv[3])), sys.argv[1:])
    assert seen == [(ADDRESS, "https://***@host/rows.jsonl?sig=***")]


# ---- a whole run -----------------------------------------------------------------------------------------------------


class Handler(BaseHTTPRequestHandler):
    """Gives the rows to whoever has the password and the signature."""

    rows = b""

    def do_GET(self):
        may = self.headers.get("Authorization", "") == f"Basic {SECRETS[-1]}" and self.path.endswith(f"sig={SIGNATURE}")
        self.send_response(200 if may else 401)
        body = self.rows if may else b""
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_):
        pass


@pytest.fixture
def port(place):
    Handler.rows = (place / "rows.jsonl").read_bytes()
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield server.server_port
        server.shutdown()
        thread.join()


TRACKIO = """
import pathlib
told = pathlib.Path(__file__).with_name("told.txt").open("a")
class Run:
    def log(self, values, step): print(values, file=told, flush=True)
    def finish(self): pass
class Config:
    def update(self, values, allow_val_change): print(values, file=told, flush=True)
config = Config()
def init(**names): return Run()
"""


def whole_run(place, address: str) -> list[tuple[int, str]]:
    logging.getLogger().handlers.clear()
    sys.path.insert(0, str(place / "package"))
    flags = ["--pretrain", f"{place}/model", "--dataset", address, "--max_len", "128"]
    out = ["--save_path", f"{place}/out", "--train_batch_size", "8", "--report_to", "trackio", "--eval_fraction", "0.3"]
    return [run_to_status([*flags, *out]), run_to_status([f"{place}/out"], report.main)]


def test_a_wrong_password_is_said_without_it(port, tmp_path):
    address = f"http://{USER}:{PASSWORD}@127.0.0.1:{port}/rows.jsonl?sig={SIGNATURE}"
    with pytest.raises(DataError) as caught:
        local_copies(address.replace(PASSWORD, PASSWORD * 2), tmp_path)
    assert str(caught.value).startswith(
        f"http://127.0.0.1:{port}/rows.jsonl: must be readable from here; got 'HTTP Error 401"
    )
    assert not [secret for secret in SECRETS if secret in str(caught.value)]


def test_a_run_on_an_address_with_a_password_and_a_key_leaves_neither(port, place):
    (place / "package").mkdir()
    (place / "package/trackio.py").write_text(TRACKIO)
    address = f"http://{USER}:{PASSWORD}@127.0.0.1:{port}/rows.jsonl?sig={SIGNATURE}"
    (done,) = run_ranks(whole_run, 1, place, place, address)
    assert [code for code, _ in done] == [0, 0], done
    said = f"http://***@127.0.0.1:{port}/rows.jsonl?sig=***"
    with pytest.raises(DataError, match="its dataset must be whole addresses; got http://"):
        read_split(str(place / "out/eval_split.json"))
    for file in ("out/run.yaml", "out/eval_split.json", "out/report.html", "package/told.txt"):
        assert said in (place / file).read_text(), file
    files = [path for path in place.rglob("*") if path.is_file()]
    assert {"README.md", "state.json", "metrics.jsonl", "rewards.jsonl"} <= {path.name for path in files}
    for path in files:
        found = [secret for secret in SECRETS if secret.encode() in path.read_bytes()]
        assert not found, f"{path} holds {found}"
    assert not [secret for secret in SECRETS for _, text in done if secret in text]
