"""kvcached doctor: each thing that can be wrong has one line, with what to do."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from kvcached_core.cli import doctor
from kvcached_core.cli.doctor import Finding, Status, Surroundings, examine
from kvcached_core.cli.servers import _processes
from kvcached_core.devices import HOST_PID_NAMESPACE, Inventory, Unavailable, inventory
from kvcached_core.errors import UnsupportedError
from kvcached_core.ledger_file import ledger_path

from tests.core import recorded_nvml as nvml
from tests.core.command import kvcached
from tests.core.follower import GIB, MIB, Follower
from tests.core.recorded_nvml import Recorded, RecordedNvml
from tests.core.site_packages import VLLM_GROUPS, SitePackages, only

GPU_ID = "GPU-3f1c0a7e-1111-2222-3333-444455556666"
MIG_ID = "MIG-7a1b0a7e-1111-2222-3333-444455556666"


class Machine:
    """A healthy machine with an empty Python environment, no GPU and no container, to be made worse."""

    def __init__(self, root: Path, runtime_dir: Path) -> None:
        self.site = SitePackages(root / "site")
        self.proc = root / "proc"
        self.dev = root / "dev"
        self.dev.mkdir()
        self.proc.mkdir()
        (self.proc / "uptime").write_text("10000.00 20000.00\n")
        self.enter(HOST_PID_NAMESPACE)
        self.mount("tmpfs")
        self.environ = {"ENABLE_KVCACHED": "1", "KVCACHED_RUNTIME_DIR": str(runtime_dir)}
        self.inventory = Inventory(unavailable=Unavailable.NO_DRIVER)
        self.lacking: tuple[str, ...] | UnsupportedError = ()

    def enter(self, namespace: str) -> None:
        link = self.proc / "self/ns/pid"
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(namespace)

    def mount(self, source: str) -> None:
        (self.proc / "self/mountinfo").write_text(
            "21 1 0:19 / /sys rw - sysfs sysfs rw\n"
            f"25 21 0:22 / /dev/shm rw,nosuid,nodev shared:4 - tmpfs {source} rw,size=65536k\n"
        )

    def run_process(
        self, host_pid: int, inner_pid: int, command: str, *, parent: int = 1, age_seconds: int = 5000, **environ: str
    ) -> None:
        folder = self.proc / str(host_pid)
        folder.mkdir()
        started = (10000 - age_seconds) * os.sysconf("SC_CLK_TCK")
        (folder / "status").write_text(f"NSpid:\t{host_pid}\t{inner_pid}\n")
        (folder / "cmdline").write_bytes(command.replace(" ", "\0").encode() + b"\0")
        (folder / "stat").write_text(f"{host_pid} (a (strange) name) S {parent} {'0 ' * 17}{started} 0 0\n")
        (folder / "environ").write_bytes(b"".join(f"{name}={value}\0".encode() for name, value in environ.items()))

    def ask_virtual_memory(self) -> tuple[str, ...]:
        if isinstance(self.lacking, UnsupportedError):
            raise self.lacking
        return self.lacking

    def findings(self) -> list[Finding]:
        here = Surroundings(
            self.environ,
            search_path=[str(self.site.path)],
            proc=self.proc,
            dev=self.dev,
            ask_devices=lambda: self.inventory,
            ask_virtual_memory=self.ask_virtual_memory,
        )
        with only(self.site):
            return list(examine(here).findings)

    def problems(self) -> list[Finding]:
        return [finding for finding in self.findings() if finding.status is Status.PROBLEM]

    def problem(self) -> Finding:
        """The one problem there is."""
        (problem,) = self.problems()
        return problem


@pytest.fixture
def machine(tmp_path: Path, runtime_dir: Path) -> Machine:
    return Machine(tmp_path, runtime_dir)


@pytest.fixture
def vllm_machine(machine: Machine) -> Machine:
    machine.site.add_vllm("0.32.0")
    machine.site.add_vllm_plugin(*VLLM_GROUPS)
    machine.site.add_releases("0.32.0")
    return machine


def of(findings: list[Finding], check: str) -> list[Finding]:
    return [finding for finding in findings if finding.check == check]


# --- this environment -------------------------------------------------------------------------------------------------


def test_a_healthy_machine_has_no_problem(vllm_machine: Machine) -> None:
    findings = vllm_machine.findings()
    assert {finding.status for finding in findings} == {Status.OK, Status.NOTE}
    (plugin,) = of(findings, "plugin")
    assert plugin.message == "vLLM 0.32.0 finds kvcached-vllm 0.1.0"
    (release,) = of(findings, "release")
    assert release.message == "vLLM 0.32.0 is a tested release"


def test_without_the_variable_kvcached_is_inactive_and_that_is_a_note(vllm_machine: Machine) -> None:
    del vllm_machine.environ["ENABLE_KVCACHED"]
    (switch,) = of(vllm_machine.findings(), "switch")
    assert switch.status is Status.NOTE
    assert switch.message.startswith("inactive")
    assert "export ENABLE_KVCACHED=1" in switch.fix


@pytest.mark.parametrize("name", ["KVCACHED_ENABLE", "ENABLE_KV_CACHED", "ENABLE_KVCACHE", "VLLM_ENABLE_KVCACHED"])
def test_a_wrong_variable_is_named_with_the_right_one(machine: Machine, name: str) -> None:
    machine.environ[name] = "1"
    problem = machine.problem()
    assert (problem.check, problem.message) == ("switch", f"{name} turns nothing on")
    assert problem.fix == "set ENABLE_KVCACHED=1 instead"


def test_unknown_settings_and_bad_values_are_each_a_line(machine: Machine) -> None:
    machine.environ["KVCACHED_CELING"] = "1GiB"
    assert machine.problem().message == "KVCACHED_CELING is not a setting. Did you mean KVCACHED_CEILING?"
    del machine.environ["KVCACHED_CELING"]
    machine.environ["KVCACHED_CEILING"] = "12G"
    machine.environ["KVCACHED_WEIGHT"] = "-1"
    assert [problem.check for problem in machine.problems()] == ["settings", "settings"]
    assert "'12G'" in machine.problems()[0].message
    assert "512MiB" in machine.problems()[0].message
    machine.environ = {"ENABLE_KVCACHED": "maybe"}
    assert machine.problem().message.startswith("ENABLE_KVCACHED='maybe'")


def test_an_engine_without_our_plugin_is_inactive(machine: Machine) -> None:
    machine.site.add_vllm("0.32.0")
    problem = machine.problem()
    assert problem.check == "plugin"
    assert problem.message == "inactive: vLLM 0.32.0 is in this environment and kvcached-vllm is not"
    assert problem.fix == "pip install kvcached-vllm"


def test_a_second_engine_without_plugin_is_a_note(vllm_machine: Machine) -> None:
    vllm_machine.site.add("sglang", "0.5.23", module="sglang")
    notes = [finding for finding in of(vllm_machine.findings(), "plugin") if finding.status is Status.NOTE]
    assert [note.fix for note in notes] == ["pip install kvcached-sglang"]
    assert vllm_machine.problems() == []


def test_a_plugin_without_metadata_is_not_found_by_the_engine(machine: Machine) -> None:
    machine.site.add_vllm()
    machine.site.add_releases("0.32.0")
    problem = machine.problem()
    assert problem.message == "kvcached_vllm can be imported and has no metadata, so vLLM cannot find it"
    assert "pip install kvcached-vllm (with -e for a checkout)" in problem.fix


def test_an_entry_point_that_is_missing_is_named(machine: Machine) -> None:
    machine.site.add_vllm()
    machine.site.add_vllm_plugin("vllm.general_plugins")
    assert machine.problem().message == "kvcached-vllm is installed without its entry point in vllm.platform_plugins"


def test_a_list_of_plugins_that_leaves_ours_out(vllm_machine: Machine) -> None:
    vllm_machine.environ["VLLM_PLUGINS"] = "lora_resolver, kvcached"
    problem = vllm_machine.problem()
    assert problem.check == "plugin-list"
    assert problem.message == "inactive: VLLM_PLUGINS='lora_resolver, kvcached' leaves out kvcached"
    assert problem.fix == "add kvcached to VLLM_PLUGINS, without blanks, or unset it"


def test_a_target_device_that_makes_vllm_skip_plugins(vllm_machine: Machine) -> None:
    vllm_machine.environ["VLLM_TARGET_DEVICE"] = "cpu"
    assert vllm_machine.problem().fix == "unset VLLM_TARGET_DEVICE"


def test_an_untested_release_is_inactive_unless_it_is_allowed(machine: Machine) -> None:
    machine.site.add_vllm("0.40.0")
    machine.site.add_vllm_plugin(*VLLM_GROUPS)
    machine.site.add_releases("0.32.0")
    problem = machine.problem()
    assert (problem.check, problem.message) == ("release", "inactive: vLLM 0.40.0 is not tested; 0.32.0 is")
    machine.environ["KVCACHED_ALLOW_UNTESTED"] = "1"
    (release,) = of(machine.findings(), "release")
    assert release.status is Status.NOTE


def test_the_real_tables_of_releases_are_read_without_importing_an_engine(machine: Machine) -> None:
    pytest.importorskip("kvcached_vllm.releases")
    pytest.importorskip("kvcached_sglang.releases")
    for engine, tested, newer in zip(doctor.ENGINES, ("0.33.0", "0.5.23"), ("0.99.0", "0.9.0"), strict=True):
        here = Surroundings(machine.environ)
        assert [finding.status for finding in doctor._check_release(here, engine, tested)] == [Status.OK]
        assert [finding.status for finding in doctor._check_release(here, engine, newer)] == [Status.PROBLEM]
        allowed = replace(here, environ=machine.environ | {"KVCACHED_ALLOW_UNTESTED": "1"})
        assert [finding.status for finding in doctor._check_release(allowed, engine, newer)] == [Status.NOTE]
        assert [finding.status for finding in doctor._check_release(allowed, engine, "0.1.0")] == [Status.PROBLEM]


def test_a_plugin_that_cannot_be_imported_says_why(machine: Machine) -> None:
    machine.site.add_vllm()
    machine.site.add_vllm_plugin(*VLLM_GROUPS)
    machine.site.add_module("kvcached_vllm", "import kvcached_core.gone\n")
    assert "kvcached_vllm cannot be imported: No module named 'kvcached_core.gone'" in machine.problem().message


def test_the_upstream_package_is_refused(vllm_machine: Machine) -> None:
    vllm_machine.site.add("kvcached", "0.1.5")
    problem = vllm_machine.problem()
    assert (problem.check, problem.fix) == ("upstream", "pip uninstall kvcached")
    assert problem.message.startswith("the distribution kvcached 0.1.5 is installed")


# --- ledgers ----------------------------------------------------------------------------------------------------------


def test_members_are_named_as_active(machine: Machine, runtime_dir: Path) -> None:
    with Follower(runtime_dir, "qwen3", in_use=MIB):
        (ledger,) = of(machine.findings(), "ledger")
    assert (ledger.status, ledger.message) == (Status.OK, "host: active members: qwen3 (vllm, serving)")


def test_a_stopped_member_is_named_with_its_process(machine: Machine, runtime_dir: Path) -> None:
    with Follower(runtime_dir, "qwen3") as member:
        member.process.send_signal(signal.SIGSTOP)
        deadline = time.monotonic() + 10
        while not (problems := machine.problems()):
            assert time.monotonic() < deadline
    assert re.fullmatch(rf"qwen3 \(process {member.pid}\) is silent for \d+ s", problems[0].message)
    assert f"kill -CONT {member.pid}" in problems[0].fix


def test_a_damaged_ledger_is_a_problem(machine: Machine, runtime_dir: Path) -> None:
    path = ledger_path(runtime_dir, GPU_ID)
    path.write_bytes(b"x" * 4096)
    problem = machine.problem()
    assert problem.check == "ledger"
    assert f"{path} is not a ledger" in problem.message


def test_a_runtime_directory_that_is_none(machine: Machine, tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    machine.environ["KVCACHED_RUNTIME_DIR"] = str(file)
    assert machine.problem().message == f"{file} is not a directory"


def test_a_runtime_directory_that_cannot_be_written(machine: Machine, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root, to become a user who may not write there")
    private = tmp_path / "private"
    private.mkdir(mode=0o755)
    machine.environ["KVCACHED_RUNTIME_DIR"] = str(private)
    for folder in (tmp_path, *tmp_path.parents):
        if folder.stat().st_mode & 0o005 != 0o005:
            folder.chmod(0o755)
    os.seteuid(65534)
    try:
        (problem,) = of(list(doctor.check_runtime_dir(Surroundings(machine.environ))), "runtime-dir")
    finally:
        os.seteuid(0)
    assert problem.message == f"user 65534 cannot write to {private}"


def test_a_full_file_system(machine: Machine, monkeypatch: pytest.MonkeyPatch, runtime_dir: Path) -> None:
    full = os.statvfs_result((4096, 4096, 100, 0, 0, 10, 10, 10, 0, 255))
    monkeypatch.setattr("os.statvfs", lambda _: full)
    problem = machine.problem()
    assert problem.message == f"{runtime_dir} is full: 0 B left, a ledger needs 0.13 MiB"
    assert "--shm-size" in problem.fix


def test_a_directory_that_does_not_exist_yet_is_made_by_the_first_engine(machine: Machine, runtime_dir: Path) -> None:
    machine.environ["KVCACHED_RUNTIME_DIR"] = str(runtime_dir / "later")
    (found,) = of(machine.findings(), "runtime-dir")
    assert (found.status, found.message) == (Status.OK, f"{runtime_dir / 'later'}, made by the first engine")
    assert not (runtime_dir / "later").exists()


def test_a_ledger_in_the_containers_own_shm_is_private(machine: Machine) -> None:
    machine.enter("pid:[4026532000]")
    assert of(machine.findings(), "isolation") == []
    machine.mount("shm")
    (note,) = of(machine.findings(), "isolation")
    assert "private to this container" in note.message
    assert "KVCACHED_RUNTIME_DIR" in note.fix


@pytest.fixture
def other_users_ledgers() -> Iterator[Path]:
    path = Path("/dev/shm/kvcached-4294967")
    path.mkdir()
    yield path
    path.rmdir()


def test_ledgers_of_another_user_are_noted(machine: Machine, other_users_ledgers: Path) -> None:
    notes = [finding.message for finding in of(machine.findings(), "isolation")]
    assert any(str(other_users_ledgers) in note for note in notes)


# --- servers ----------------------------------------------------------------------------------------------------------


def test_a_server_whose_worker_is_a_member_is_active(machine: Machine, runtime_dir: Path) -> None:
    machine.run_process(100, 100, "/venv/bin/python /venv/bin/vllm serve qwen3", ENABLE_KVCACHED="1")
    machine.run_process(101, 101, "VLLM::EngineCore", parent=100)
    with Follower(runtime_dir, "qwen3") as member:
        machine.run_process(member.pid, member.pid, "VLLM::Worker", parent=101)
        (server,) = of(machine.findings(), "server")
    assert server.status is Status.OK
    assert server.message == "vLLM server 100 (vllm serve qwen3) is active: member qwen3"


def test_a_server_that_asked_for_kvcached_and_is_no_member_is_a_problem_once_it_had_time(machine: Machine) -> None:
    command = "python -m sglang.launch_server --model-path qwen3"
    environ = {name: machine.environ[name] for name in ("ENABLE_KVCACHED", "KVCACHED_RUNTIME_DIR")}
    machine.run_process(100, 100, command, age_seconds=30, **environ)
    machine.run_process(101, 101, command, parent=100, **environ)  # forked, and not a server of its own
    (starting,) = of(machine.findings(), "server")
    assert starting.status is Status.NOTE
    machine.run_process(200, 200, command, **environ)
    problem = machine.problem()
    assert problem.message.startswith("SGLang server 200 (sglang.launch_server --model-path qwen3) is inactive")
    assert "KVCACHED_STRICT=1" in problem.fix


def test_servers_that_did_not_ask_or_have_another_directory_are_notes(machine: Machine) -> None:
    machine.run_process(100, 100, "vllm serve a")
    machine.run_process(200, 200, "sglang serve b", ENABLE_KVCACHED="1", KVCACHED_RUNTIME_DIR="/shared")
    plain, elsewhere = of(machine.findings(), "server")
    assert plain.message == "vLLM server 100 (vllm serve a) is inactive: ENABLE_KVCACHED is not set for it"
    assert elsewhere.fix == "KVCACHED_RUNTIME_DIR=/shared kvcached doctor"
    assert machine.problems() == []


@pytest.mark.parametrize("command", ["vllm bench serve", "grep vllm serve.log", "python -m vllm.nonsense", "vllm"])
def test_other_commands_are_no_servers(machine: Machine, command: str) -> None:
    machine.run_process(100, 100, command)
    assert of(machine.findings(), "server") == []


def test_this_machines_processes_can_be_read() -> None:
    me = next(each for each in _processes(Path("/proc")) if each.pid == os.getpid())
    assert me.parent == os.getppid()
    assert 0 < me.started_seconds < float(Path("/proc/uptime").read_text().split()[0])


# --- devices ----------------------------------------------------------------------------------------------------------


def recorded(*devices: Recorded, failure: nvml.NVMLError | None = None) -> Inventory:
    return inventory(RecordedNvml(*devices, failure=failure))


def test_a_device_is_shown_with_its_memory_and_driver(machine: Machine) -> None:
    machine.inventory = recorded(Recorded(GPU_ID))
    findings = machine.findings()
    (driver,) = of(findings, "driver")
    assert driver.message == "GPU-3f1c0a7e NVIDIA H200, 100.00 GiB of 139.00 GiB free, driver 580.95.05"
    assert [finding.status for finding in of(findings, "vmm")] == [Status.OK]


def test_no_driver_is_a_note_and_a_failing_one_a_problem(machine: Machine) -> None:
    assert [finding.status for finding in of(machine.findings(), "driver")] == [Status.NOTE]
    machine.inventory = recorded(failure=nvml.NVMLError_Unknown("Driver/library version mismatch"))
    assert machine.problem().message == "the NVIDIA driver does not answer: Driver/library version mismatch"


def test_a_missing_package_matters_where_there_is_a_driver(machine: Machine) -> None:
    machine.inventory = Inventory(unavailable=Unavailable.NO_PACKAGE)
    assert machine.problems() == []
    (machine.dev / "nvidiactl").touch()
    problem = machine.problem()
    assert (problem.check, problem.fix) == ("driver", "pip install 'kvcached-core[cuda]'")


def test_a_device_without_virtual_memory_is_a_problem(machine: Machine) -> None:
    machine.inventory = recorded(Recorded(GPU_ID))
    machine.lacking = ("device 0 (GRID A16-4Q)",)
    assert machine.problem().message.startswith("device 0 (GRID A16-4Q) has no virtual memory management")
    machine.lacking = UnsupportedError("the cuda backend needs the package cuda-bindings")
    assert machine.problem().check == "vmm"


def test_mig_and_mps_are_explained(machine: Machine) -> None:
    instance = Recorded(MIG_ID, name="NVIDIA H200 MIG 1g.18gb")
    machine.inventory = recorded(Recorded(GPU_ID, instances=[instance]), Recorded("GPU-2-2-2", mps={7: 1}))
    findings = machine.findings()
    assert [finding.message for finding in of(findings, "mig")] == ["MIG-7a1b0a7e is a MIG instance of GPU-3f1c0a7e"]
    (mps,) = of(findings, "mps")
    assert mps.message == "an MPS server runs on GPU-2: a fault in one client ends all of them"


def test_a_process_outside_the_ledger_is_named_with_what_it_holds(machine: Machine, runtime_dir: Path) -> None:
    machine.run_process(6000, 9, "python train.py --model big")
    with Follower(runtime_dir, "qwen3", device_id=GPU_ID) as member:
        machine.run_process(5000, member.pid, "VLLM::Worker")
        machine.inventory = recorded(Recorded(GPU_ID, compute={5000: 20 * GIB, 6000: 60 * GIB}))
        problem = machine.problem()
    assert problem.check == "outsiders"
    assert problem.message == (
        "GPU-3f1c0a7e: process 6000 (python train.py --model big) holds 60.00 GiB outside the ledger"
    )
    assert "KVCACHED_HEADROOM" in problem.fix


def test_an_outsider_that_fits_into_the_headroom_is_a_note(machine: Machine) -> None:
    machine.run_process(6000, 6000, "Xorg")
    machine.inventory = recorded(Recorded(GPU_ID, graphics={6000: 100 * MIB}))
    assert [finding.status for finding in of(machine.findings(), "outsiders")] == [Status.NOTE]


def test_from_a_container_processes_are_counted_and_not_named(machine: Machine, runtime_dir: Path) -> None:
    machine.enter("pid:[4026532000]")
    with Follower(runtime_dir, "qwen3", device_id=GPU_ID, total_bytes=139 * GIB, static=38 * GIB):
        machine.inventory = recorded(Recorded(GPU_ID, compute={5000: 38 * GIB}))
        assert machine.problems() == []
        machine.inventory = recorded(Recorded(GPU_ID, free_bytes=41 * GIB, compute={5000: 38 * GIB, 6000: 60 * GIB}))
        problem = machine.problem()
    assert problem.message == (
        "GPU-3f1c0a7e: 2 processes by NVML, 1 in this ledger, 60.00 GiB held by nobody in it. "
        "In a container pids cannot be compared"
    )
    assert problem.fix == (
        "mount one KVCACHED_RUNTIME_DIR for all engines of the device; kvcached doctor on the host names them"
    )


def test_where_nvml_hides_processes_the_memory_that_nobody_holds_tells(machine: Machine) -> None:
    machine.enter("pid:[4026532000]")
    machine.inventory = recorded(Recorded(GPU_ID, total_bytes=139 * GIB, free_bytes=60 * GIB))
    assert "0 processes by NVML, 0 in this ledger, 79.00 GiB held by nobody" in machine.problem().message


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_works_without_gpu_and_engine_and_its_code_says_whether_there_is_a_problem(
    runtime_dir: Path,
) -> None:
    good = kvcached("doctor", runtime_dir=runtime_dir)
    assert good.code == 0, good.out
    assert good.out.splitlines()[-1] == "no problem found"
    bad = kvcached("doctor", runtime_dir=runtime_dir, environ={"KVCACHED_CELING": "1", "KVCACHED_ENABLE": "1"})
    assert bad.code == 1
    assert bad.out.splitlines()[-1] == "2 problems found"
    assert all(line.startswith(("ok ", "note ", "problem ")) for line in bad.out.splitlines()[:-1])


def test_the_command_in_json(runtime_dir: Path) -> None:
    done = kvcached("doctor", "--json", runtime_dir=runtime_dir, environ={"KVCACHED_CELING": "1"})
    assert done.code == 1
    assert (done.document["schema"], done.document["num_problems"]) == ("kvcached.doctor/1", 1)
    (problem,) = (finding for finding in done.document["findings"] if finding["status"] == "problem")
    assert set(problem) == {"check", "status", "message", "fix"}
    assert problem["check"] == "settings"


def test_the_runbook_has_a_heading_for_every_check() -> None:
    source = Path(doctor.__file__).read_text()
    checks = set(re.findall(r'Finding\(\s*"([a-z-]+)"', source))
    runbook = (Path(__file__).parents[2] / "docs" / "operations.md").read_text()
    assert checks == set(re.findall(r"^### `([a-z-]+)`", runbook, re.MULTILINE))
