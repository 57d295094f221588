"""A real Slurm on this one machine, with virtual nodes: munged, slurmctld and one slurmd a node, as root and without systemd.

Each slurmd lives in a UTS namespace of its own, so that on node n0 the host name is n0, and has a loopback address of its own. CPUs,
memory and GPUs of the nodes are false (GPUs are device files like /dev/null): Slurm hands them out all the same.

With AREAL_MEGA_TEST_SLURM=existing the tests use the Slurm that ``SLURM_CONF`` or /etc/slurm names instead.

By hand, from the root of the repository: ``python tests/slurm/lab.py up DIR`` and ``python tests/slurm/lab.py down DIR``.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path

PACKAGES = ("slurmctld", "slurmd", "slurm-client", "munge")
PROGRAMS = ("slurmctld", "slurmd", "sbatch", "squeue", "munged", "munge", "unshare", "mknod")
_MARK = "# areal-mega test lab"
_HOSTS = Path("/etc/hosts")


class LabUnavailable(Exception):
    """Slurm cannot run here; the message says why."""


class SlurmLab:
    """Args:
    folder: everything of the lab goes there; short, for the paths of Unix sockets are bounded.
    """

    def __init__(self, folder: Path, nodes: int = 4, cpus: int = 64, gpus: int = 8, memory_mb: int = 1_000_000) -> None:
        self.folder, self.nodes = folder, [f"n{index}" for index in range(nodes)]
        self._cpus, self._gpus, self._memory_mb = cpus, gpus, memory_mb
        self.env = {"SLURM_CONF": str(folder / "slurm.conf")}
        self._pids_file = folder / "pids.json"
        self._children: list[subprocess.Popen[bytes]] = []
        self._mark = f"{_MARK} {folder}"

    def up(self) -> None:
        """Start everything; returns when all nodes are idle.

        Raises:
            LabUnavailable: not root, no packages, or a daemon that does not come up (with its last lines).
        """
        if os.geteuid() != 0:
            raise LabUnavailable("virtual nodes need root")
        _install()
        self.folder.mkdir(parents=True, mode=0o755)
        self._configure()
        self._name_nodes()
        key = self.folder / "munge.key"
        key.write_bytes(secrets.token_bytes(128))
        key.chmod(0o600)
        (self.folder / "munge").mkdir(mode=0o755)
        self._start(
            "munged",
            ["munged", "--foreground", "--force", f"--key-file={key}", f"--socket={self._socket}", "--num-threads=2"]
            + [f"--{kind}-file={self.folder / 'munge' / kind}" for kind in ("pid", "seed", "log")],
        )
        self._until("munged", lambda: self._ok(["munge", "-S", str(self._socket), "-n"]))
        self._start("slurmctld", ["slurmctld", "-D", "-f", self.env["SLURM_CONF"]])
        self._until("slurmctld", lambda: b"is UP" in self._ask(["scontrol", "ping"]))
        for node in self.nodes:
            self.boot(node)
        self._until(
            self.nodes[0], lambda: len(self._ask(["sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N"]).split()) == len(self.nodes)
        )

    def boot(self, node: str) -> None:
        """Start a node's slurmd."""
        inner = 'hostname "$1"; exec slurmd -D -N "$1" -f "$2"'
        self._start(node, ["unshare", "--uts", "sh", "-c", inner, "sh", node, self.env["SLURM_CONF"]])

    def crash(self, node: str) -> None:
        """Pull a node's plug: SIGKILL to everything in its namespace. Slurm notices by itself, after SlurmdTimeout."""
        for pid in self.processes(node):
            _kill(pid, signal.SIGKILL)

    def processes(self, node: str) -> list[int]:
        """Every process of a virtual node."""
        pid = self._pids().get(node)
        namespace = _namespace(pid) if pid is not None else None
        if namespace is None or namespace == _namespace(os.getpid()):
            return []
        return [int(name) for name in os.listdir("/proc") if name.isdigit() and _namespace(int(name)) == namespace]

    def down(self) -> None:
        """End jobs, daemons, and what jobs left behind on the nodes."""
        for node in self.nodes:
            for pid in self.processes(node):
                _kill(pid, signal.SIGKILL)
        for name in ("slurmctld", "munged"):
            if (pid := self._pids().get(name)) is not None:
                _kill(pid, signal.SIGKILL)
        for process in self._children:
            process.wait(timeout=10)
        self._rewrite_hosts([])
        shutil.rmtree(self.folder, ignore_errors=True)

    def run(self, argv: Sequence[str], timeout_s: float = 60.0) -> str:
        """Run one of Slurm's client programs; returns its output."""
        done = subprocess.run(argv, env={**os.environ, **self.env}, capture_output=True, text=True, timeout=timeout_s)
        assert done.returncode == 0, f"{' '.join(argv)}: {done.stderr}"
        return done.stdout

    @property
    def _socket(self) -> Path:
        return self.folder / "munge" / "socket"

    def _configure(self) -> None:
        ports = _free_ports(len(self.nodes) + 1)
        for index in range(self._gpus):
            subprocess.run(["mknod", str(self.folder / f"gpu{index}"), "c", "1", "3"], check=True)
        host = socket.gethostname().partition(".")[0]
        settings = {
            "ClusterName": "lab",
            "SlurmctldHost": f"{host}(127.0.0.1)",
            "SlurmUser": "root",
            "SlurmdUser": "root",
            "AuthType": "auth/munge",
            "AuthInfo": f"socket={self._socket},cred_expire=5",
            "SlurmctldPort": ports[0],
            "StateSaveLocation": self.folder / "state",
            "SlurmdSpoolDir": self.folder / "spool-%n",
            "SlurmctldPidFile": self.folder / "slurmctld.pid",
            "SlurmdPidFile": self.folder / "%n.pid",
            "SlurmctldLogFile": self.folder / "slurmctld.log",
            "SlurmdLogFile": self.folder / "%n.log",
            "ProctrackType": "proctrack/linuxproc",
            "TaskPlugin": "task/none",
            "JobAcctGatherType": "jobacct_gather/none",
            "AccountingStorageType": "accounting_storage/none",
            "MailProg": "/bin/true",
            "MpiDefault": "none",
            "SelectType": "select/cons_tres",
            "SelectTypeParameters": "CR_CPU_Memory",
            "SchedulerType": "sched/backfill",
            "SchedulerParameters": "sched_interval=2,batch_sched_delay=0,sched_min_interval=0,bf_interval=2",
            "SlurmdParameters": "config_overrides",
            "ReturnToService": 2,
            "KillWait": 15,
            "MinJobAge": 3600,
            "SlurmdTimeout": 15,
            "PreemptType": "preempt/partition_prio",
            "PreemptMode": "REQUEUE",
            "GresTypes": "gpu",
        }
        if any(info[4][0] == "127.0.0.1" for info in socket.getaddrinfo(host, None, socket.AF_INET)):
            settings["CommunicationParameters"] = "NoCtldInAddrAny"
        lines = [f"{name}={value}" for name, value in settings.items()]
        gres = ["AutoDetect=off"]
        for index, node in enumerate(self.nodes):
            shape = f"CPUs={self._cpus} RealMemory={self._memory_mb} Gres=gpu:{self._gpus} State=UNKNOWN"
            lines.append(f"NodeName={node} NodeAddr={_address(index)} Port={ports[index + 1]} {shape}")
            gres.append(f"NodeName={node} Name=gpu File={self.folder}/gpu[0-{self._gpus - 1}]")
            (self.folder / f"spool-{node}").mkdir()
        common = "Nodes=ALL MaxTime=INFINITE DefMemPerCPU=64 State=UP"
        lines.append(f"PartitionName=main {common} Default=YES PriorityTier=10 PreemptMode=OFF")
        lines.append(f"PartitionName=low {common} PriorityTier=1 PreemptMode=REQUEUE GraceTime=0")
        (self.folder / "state").mkdir()
        (self.folder / "slurm.conf").write_text("\n".join(lines) + "\n")
        (self.folder / "gres.conf").write_text("\n".join(gres) + "\n")
        version = subprocess.run(["slurmctld", "-V"], capture_output=True, text=True, check=True).stdout.split()[-1]
        major = tuple(int(part) for part in version.split(".")[:2])
        # From 24.05 on, slurmd asks for cgroups unless told that there are none.
        (self.folder / "cgroup.conf").write_text("CgroupPlugin=disabled\n" if major >= (24, 5) else "# none\n")

    def _name_nodes(self) -> None:
        # Another lab on this machine has lines of its own, to the same effect.
        self._rewrite_hosts([f"{_address(index)} {node} {self._mark}" for index, node in enumerate(self.nodes)])
        addresses = subprocess.run(["ip", "-4", "-o", "addr", "show", "up"], capture_output=True, text=True)
        if addresses.returncode == 0 and all(" 127.0.0.1/" in line for line in addresses.stdout.splitlines()):
            # Slurm resolves no name at all on a machine whose only address is 127.0.0.1.
            subprocess.run(["ip", "addr", "add", "127.0.1.1/32", "dev", "lo"], check=False)

    def _rewrite_hosts(self, lines: Sequence[str]) -> None:
        kept = [line for line in _HOSTS.read_text().splitlines() if not line.endswith(self._mark)]
        _HOSTS.write_text("\n".join([*kept, *lines]) + "\n")  # in place: in a container it is a mount and cannot be renamed over

    def _all_idle(self) -> bool:
        return len(self._ask(["sinfo", "-h", "-N", "-p", "main", "-t", "idle", "-o", "%N"]).split()) == len(self.nodes)

    def _start(self, name: str, argv: Sequence[str]) -> None:
        env = {**os.environ, **self.env}
        with open(self.folder / f"{name}.out", "ab") as out:
            process = subprocess.Popen(argv, stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, env=env)
        self._children.append(process)
        self._pids_file.write_text(json.dumps(self._pids() | {name: process.pid}))

    def _pids(self) -> dict[str, int]:
        return dict(json.loads(self._pids_file.read_text())) if self._pids_file.exists() else {}

    def _until(self, name: str, ready: Callable[[], bool], timeout_s: float = 60.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not ready():
            if time.monotonic() > deadline:
                words = [
                    path.read_text(errors="replace")[-600:]
                    for path in (self.folder / f"{name}.out", self.folder / f"{name}.log")
                    if path.exists()
                ]
                self.down()
                raise LabUnavailable(f"{name} is not ready after {timeout_s:g} s: {' '.join(words)}")
            time.sleep(0.2)

    def _ask(self, argv: Sequence[str]) -> bytes:
        return subprocess.run(argv, env={**os.environ, **self.env}, capture_output=True, timeout=20).stdout

    def _ok(self, argv: Sequence[str]) -> bool:
        return subprocess.run(argv, env={**os.environ, **self.env}, capture_output=True, timeout=20).returncode == 0


def _install() -> None:
    """Debian's own packages, where they are not there yet; none of them may start a daemon of its own."""
    if all(shutil.which(program) for program in PROGRAMS):
        return
    if shutil.which("apt-get") is None:
        raise LabUnavailable(f"no Slurm here and no apt-get to install {' '.join(PACKAGES)}")
    policy = Path("/usr/sbin/policy-rc.d")
    made = not policy.exists()
    if made:
        policy.write_text("#!/bin/sh\nexit 101\n")
        policy.chmod(0o755)
    env = {**os.environ, "DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "-o", "DPkg::Lock::Timeout=300", "install", "-y", "-qq", "--no-install-recommends", *PACKAGES]
    try:
        done = subprocess.run(install, env=env, capture_output=True, text=True, timeout=400)
        if done.returncode:
            subprocess.run(["apt-get", "update", "-qq"], env=env, capture_output=True, timeout=300)
            done = subprocess.run(install, env=env, capture_output=True, text=True, timeout=400)
    except subprocess.TimeoutExpired as error:
        raise LabUnavailable(f"{error.cmd[0]} did not end within {error.timeout:g} s") from error
    finally:
        if made:
            policy.unlink()
    if done.returncode or not all(shutil.which(program) for program in PROGRAMS):
        raise LabUnavailable(f"cannot install {' '.join(PACKAGES)}: {done.stderr.strip()[-300:]}")


def _address(index: int) -> str:
    return f"127.0.1.{10 + index}"


def _free_ports(count: int) -> list[int]:
    probes = [socket.socket() for _ in range(count)]
    for probe in probes:
        probe.bind(("127.0.0.1", 0))
    ports = [probe.getsockname()[1] for probe in probes]
    for probe in probes:
        probe.close()
    return ports


def _namespace(pid: int) -> str | None:
    """The UTS namespace of a living process (a zombie has none any more)."""
    try:
        return os.readlink(f"/proc/{pid}/ns/uts")
    except OSError:
        return None


def _kill(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except ProcessLookupError:
        return  # ended by itself


def main() -> None:
    verb, folder = sys.argv[1], Path(sys.argv[2]).absolute()
    lab = SlurmLab(folder)
    if verb == "up":
        lab.up()
        print(f"export SLURM_CONF={lab.env['SLURM_CONF']}")
    else:
        lab.down()


if __name__ == "__main__":
    main()
