# SPDX-License-Identifier: MIT OR Apache-2.0
"""The part of py-libzfs' interface that cockpit-zfs uses, over the JSON of `zpool` and `zfs`.

It reads only: pools, file systems, snapshots, properties, verification, pools that can be imported.
Each `ZFS` object reads everything once, when it is first asked for, and shows that state from then on.
NACRE names the program where it is not `nacre` in PATH.
"""

import enum
import json
import os
import re
import shutil
import socket
import subprocess
import time
from datetime import datetime, timezone

__all__ = [
    "DatasetType", "Error", "PoolStatus", "PropertySource", "ScanFunction", "ScanState", "ZFS", "ZFSDataset",
    "ZFSException", "ZFSImportablePool", "ZFSPool", "ZFSProperty", "ZFSSnapshot", "ZFSVdev",
]


class DatasetType(enum.IntEnum):
    FILESYSTEM = 1
    SNAPSHOT = 2
    VOLUME = 4
    BOOKMARK = 16


class Error(enum.IntEnum):
    SUCCESS = 0
    NOENT = 2009
    UNKNOWN = 2099


class PropertySource(enum.IntEnum):
    NONE = 1
    DEFAULT = 2
    TEMPORARY = 4
    LOCAL = 8
    INHERITED = 16
    RECEIVED = 32


class ScanFunction(enum.IntEnum):
    NONE = 0
    SCRUB = 1
    RESILVER = 2


class ScanState(enum.IntEnum):
    NONE = 0
    SCANNING = 1
    FINISHED = 2
    CANCELED = 3


class PoolStatus(enum.Enum):
    """What is wrong with a pool, by the names of py-libzfs; the most serious state of its devices counts."""

    OK = "OK"
    CORRUPT_DATA = "CORRUPT_DATA"
    FAILING_DEV = "FAILING_DEV"
    FAULTED_DEV_NR = "FAULTED_DEV_NR"
    FAULTED_DEV_R = "FAULTED_DEV_R"
    FEAT_DISABLED = "FEAT_DISABLED"
    IO_FAILURE_WAIT = "IO_FAILURE_WAIT"
    MISSING_DEV_NR = "MISSING_DEV_NR"
    MISSING_DEV_R = "MISSING_DEV_R"
    OFFLINE_DEV = "OFFLINE_DEV"
    REMOVED_DEV = "REMOVED_DEV"
    RESILVERING = "RESILVERING"


class ZFSException(RuntimeError):
    """A command that was refused; the message is what it said."""

    def __init__(self, code, message):
        super().__init__(message)
        self.code = code


def _program():
    found = os.environ.get("NACRE") or shutil.which("nacre")
    if found is None and os.access("/usr/bin/nacre", os.X_OK):
        found = "/usr/bin/nacre"
    if found is None:
        raise ZFSException(Error.UNKNOWN, "nacre is not in PATH, and NACRE does not name it")
    return found


def _call(*words):
    """Runs `zfs` or `zpool`, as the program answers under that name, whatever else has the name here."""
    environment = {**os.environ, "LC_ALL": "C.UTF-8", "NO_COLOR": "1"}
    try:
        return subprocess.run(
            list(words), executable=_program(), env=environment, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, encoding="utf-8", errors="surrogateescape", check=False,
        )
    except OSError as error:
        raise ZFSException(Error.UNKNOWN, "cannot run nacre: {}".format(error)) from error


def _refusal(done):
    said = done.stderr.strip() or "{} exited with {}".format(" ".join(done.args), done.returncode)
    missing = "does not exist" in said or "no such pool" in said
    return ZFSException(Error.NOENT if missing else Error.UNKNOWN, said)


def _run(*words):
    """What `zfs` or `zpool` prints. Where a pool does not answer it ends with 1, and prints the others all the same."""
    done = _call(*words)
    # A program that a signal has ended may have printed a part.
    if done.returncode < 0 or done.returncode > 0 and not done.stdout.strip():
        raise _refusal(done)
    return done.stdout


def _ask(key, *words):
    """What the JSON that they print has under this key; where the program failed, something has to be in it."""
    done = _call(*words)
    try:
        found = json.loads(done.stdout)[key]
    except (ValueError, KeyError) as error:
        raise _refusal(done) from error
    if done.returncode != 0 and not found:
        raise _refusal(done)
    return found


_NUMBERS = frozenset((
    "allocated", "available", "copies", "expandsize", "filesystem_count", "filesystem_limit", "free", "freeing",
    "leaked", "logicalreferenced", "logicalused", "quota", "referenced", "refquota", "refreservation",
    "reservation", "size", "snapshot_count", "snapshot_limit", "used", "usedbychildren", "usedbydataset",
    "usedbyrefreservation", "usedbysnapshots", "version", "volblocksize", "volsize", "written",
))
_SWITCHES = frozenset((
    "atime", "autoexpand", "autoreplace", "canmount", "checksum", "delegation", "devices", "exec",
    "listsnapshots", "mounted", "nbmand", "readonly", "setuid", "utf8only", "vscan", "xattr",
))
# A limit of 0 is none.
_LIMITS = frozenset(("quota", "refquota", "refreservation", "reservation"))
_ON_OFF = {"on": True, "yes": True, "off": False, "no": False}


def _parsed(name, raw):
    """A property as a number, a truth value, a time or text; None where it has no value."""
    if name == "creation":
        return datetime.fromtimestamp(int(raw)) if raw.isdigit() else None
    if name in _NUMBERS:
        if not raw.isdigit() or name in _LIMITS and raw == "0":
            return None
        return int(raw)
    if name in _SWITCHES:
        return _ON_OFF.get(raw)
    return None if raw == "-" else raw


class ZFSProperty:
    """A property of a pool, file system or snapshot: for people (`value`), exact (`rawvalue`), as a Python object."""

    def __init__(self, name, shown, exact):
        self.name = name
        self.value = shown["value"]
        self.rawvalue = exact["value"]
        self.parsed = _parsed(name, self.rawvalue)
        self.source = PropertySource[exact["source"]["type"]]

    def __repr__(self):
        return "<libzfs.ZFSProperty name '{}' value '{}'>".format(self.name, self.value)

    def asdict(self):
        return {
            "value": self.value, "rawvalue": self.rawvalue, "parsed": self.parsed, "source": self.source.name,
        }


def _properties(shown, exact):
    """The properties that two answers to `get -j` hold, without and with `-p`."""
    both = ((name, shown.get(name, value), value) for name, value in exact.items())
    return {name: ZFSProperty(name, human, value) for name, human, value in both}


class _Dataset:
    """What file systems and snapshots have in common."""

    def __init__(self, root, name, shown, exact):
        self.root = root
        self.name = name
        self.type = DatasetType[exact["type"]]
        self.properties = _properties(shown["properties"], exact["properties"])

    def __repr__(self):
        return "<libzfs.{} name '{}' type '{}'>".format(type(self).__name__, self.name, self.type.name)

    @property
    def pool(self):
        return self.root.get(re.split("[/@]", self.name, maxsplit=1)[0])

    def asdict(self):
        return {
            "id": self.name,
            "name": self.name,
            "pool": re.split("[/@]", self.name, maxsplit=1)[0],
            "type": self.type.name,
            "properties": {name: value.asdict() for name, value in self.properties.items()},
        }


class ZFSSnapshot(_Dataset):
    @property
    def snapshot_name(self):
        return self.name.split("@", 1)[1]

    @property
    def parent(self):
        return self.root.get_dataset(self.name.split("@", 1)[0])

    @property
    def holds(self):
        """The tags of its holds."""
        lines = _run("zfs", "holds", "-Hp", self.name).splitlines()
        return {fields[1]: int(fields[2]) for fields in (line.split("\t") for line in lines)}

    def asdict(self):
        dataset, name = self.name.split("@", 1)
        return {**super().asdict(), "dataset": dataset, "snapshot_name": name, "holds": self.holds}


class ZFSDataset(_Dataset):
    @property
    def mountpoint(self):
        """Where it is mounted, None where it is not."""
        mounted = self.properties["mounted"].parsed
        return self.properties["mountpoint"].value if mounted else None

    @property
    def children(self):
        """The file systems directly below."""
        above = self.name + "/"
        found = (dataset for name, dataset in self.root._datasets.items() if name.startswith(above))
        return (dataset for dataset in found if "/" not in dataset.name[len(above):])

    @property
    def children_recursive(self):
        above = self.name + "/"
        return (dataset for name, dataset in self.root._datasets.items() if name.startswith(above))

    @property
    def snapshots(self):
        """Its snapshots, oldest first."""
        return iter(self.root._snapshots.get(self.name, ()))

    @property
    def snapshots_recursive(self):
        for dataset in (self, *self.children_recursive):
            yield from dataset.snapshots

    def asdict(self, recursive=True):
        fields = {
            **super().asdict(),
            "mountpoint": self.mountpoint,
            "encrypted": False,
            "encryption_root": None,
            "key_loaded": False,
        }
        if recursive:
            fields["children"] = [child.asdict() for child in self.children]
        return fields


class ZFSVdev:
    """A device or group of devices, from the tree in `zpool status -j` or `zpool import`."""

    def __init__(self, fields, group):
        self.name = fields["name"]
        self.group = group
        self.path = fields.get("path")
        self.guid = fields.get("guid")
        self.status = fields["state"]
        self.children = [ZFSVdev(child, group) for child in fields.get("vdevs", {}).values()]
        kind = fields["vdev_type"]
        self.type = self.name.rsplit("-", 1)[0] if kind == "raidz" else kind
        self._fields = fields

    def __repr__(self):
        return "<libzfs.ZFSVdev type '{}', name '{}'>".format(self.type, self.name)

    @property
    def disks(self):
        """The paths of the disks in it that can be used."""
        if self.status in ("UNAVAIL", "OFFLINE"):
            return []
        if self.type == "disk":
            return [self.path]
        return [disk for child in self.children for disk in child.disks]

    @property
    def stats(self):
        size = self._fields.get("total_space", self._fields.get("phys_space", 0))
        return {
            "timestamp": time.monotonic_ns(),
            "read_errors": self._fields.get("read_errors", 0),
            "write_errors": self._fields.get("write_errors", 0),
            "checksum_errors": self._fields.get("checksum_errors", 0),
            "size": size,
            "allocated": self._fields.get("alloc_space", 0),
        }

    def asdict(self, recursive=True):
        fields = {
            "name": self.name,
            "type": self.type,
            "path": self.path,
            "guid": "" if self.guid is None else str(self.guid),
            "status": self.status,
            "stats": self.stats,
        }
        if recursive:
            fields["children"] = [child.asdict() for child in self.children]
        return fields


def _time(seconds):
    """Seconds since 1970 as py-libzfs gives them: UTC, without a zone."""
    return datetime.fromtimestamp(seconds, timezone.utc).replace(tzinfo=None) if seconds else None


class ZPoolScrub:
    """The verification or resilver of a pool that runs, or the one that ended last."""

    def __init__(self, stats):
        self._stats = stats
        self.function = ScanFunction[stats["function"]] if stats else None
        self.state = ScanState[stats["state"]] if stats else None
        self.errors = stats["errors"] if stats else None
        self.bytes_to_scan = stats["to_examine"] if stats else None
        self.bytes_scanned = self.bytes_issued = stats["issued"] if stats else None
        self.start_time = _time(stats["start_time"]) if stats else None
        running = self.state == ScanState.SCANNING
        self.end_time = _time(stats["end_time"]) if stats and not running else None
        self.pause = _time(stats["scrub_pause"]) if running else None

    @property
    def percentage(self):
        if not self._stats:
            return None
        if self.state == ScanState.FINISHED:
            return 100.0
        return min(self.bytes_scanned * 100 / self.bytes_to_scan, 100.0) if self.bytes_to_scan else 0

    @property
    def total_secs_left(self):
        if self.state != ScanState.SCANNING or not self.bytes_issued:
            return None
        passed = time.time() - self._stats["pass_start"] - self._stats["scrub_spent_paused"]
        left = max(self.bytes_to_scan - self.bytes_scanned, 0)
        return int(left * max(passed, 1) / self.bytes_issued)

    def asdict(self):
        return {
            "function": self.function.name if self.function is not None else None,
            "state": self.state.name if self.state is not None else None,
            "start_time": self.start_time,
            "end_time": self.end_time,
            "percentage": self.percentage,
            # py-libzfs has these two the wrong way round, and its users expect that.
            "bytes_to_process": self.bytes_scanned,
            "bytes_processed": self.bytes_to_scan,
            "bytes_issued": self.bytes_issued,
            "pause": self.pause,
            "errors": self.errors,
            "total_secs_left": self.total_secs_left,
        }


# Classes of devices in the JSON, and what py-libzfs calls them.
_CLASSES = (("data", "vdevs"), ("log", "logs"), ("cache", "l2cache"), ("spare", "spares"), ("special", "special"),
            ("dedup", "dedup"))


class ZFSPool:
    def __init__(self, root, name, status, properties):
        self.root = root
        self.name = name
        self._status = status
        everything = properties or {}
        self.properties = {
            key: value for key, value in everything.items() if not key.startswith("feature@")
        }
        self.features = [
            {"name": key[len("feature@"):], "guid": key[len("feature@"):], "description": "",
             "state": value.rawvalue.upper()}
            for key, value in everything.items() if key.startswith("feature@")
        ]

    def __repr__(self):
        return "<libzfs.{} name '{}' guid '{}'>".format(type(self).__name__, self.name, self.guid)

    @property
    def guid(self):
        return int(self._status["pool_guid"])

    @property
    def hostname(self):
        return socket.gethostname()

    @property
    def status(self):
        return self._status["state"]

    @property
    def error_count(self):
        return int(self._status.get("error_count", 0))

    @property
    def root_vdev(self):
        tree = self._status.get("vdevs", {}).get(self.name)
        # A pool in a bucket has no devices.
        return ZFSVdev(tree or {"name": self.name, "state": self.status, "vdev_type": "root"}, "data")

    @property
    def groups(self):
        """The groups of devices and single devices by their class."""
        found = {}
        for group, key in _CLASSES:
            tree = self._status.get(key, {})
            if group == "data":
                tree = tree.get(self.name, {}).get("vdevs", {})
            found[group] = [ZFSVdev(fields, group) for fields in tree.values()]
        return found

    @property
    def disks(self):
        return [disk for vdevs in self.groups.values() for vdev in vdevs for disk in vdev.disks]

    @property
    def scrub(self):
        return ZPoolScrub(self._status.get("scan_stats"))

    @property
    def root_dataset(self):
        return self.root.get_dataset(self.name)

    @property
    def status_code(self):
        if "status" not in self._status:
            return PoolStatus.OK
        states = set()
        waiting = [vdev for vdevs in self.groups.values() for vdev in vdevs]
        errors = 0
        while waiting:
            vdev = waiting.pop()
            states.add(vdev.status)
            errors += sum(vdev.stats[kind] for kind in ("read_errors", "write_errors", "checksum_errors"))
            waiting.extend(vdev.children)
        broken = self.status in ("UNAVAIL", "FAULTED", "SUSPENDED")
        scrub = self.scrub
        if self._status.get("suspended"):
            return PoolStatus.IO_FAILURE_WAIT
        if scrub.function == ScanFunction.RESILVER and scrub.state == ScanState.SCANNING:
            return PoolStatus.RESILVERING
        if self.error_count:
            return PoolStatus.CORRUPT_DATA
        if "FAULTED" in states:
            return PoolStatus.FAULTED_DEV_NR if broken else PoolStatus.FAULTED_DEV_R
        if "UNAVAIL" in states:
            return PoolStatus.MISSING_DEV_NR if broken else PoolStatus.MISSING_DEV_R
        if "REMOVED" in states:
            return PoolStatus.REMOVED_DEV
        if "OFFLINE" in states:
            return PoolStatus.OFFLINE_DEV
        if errors or self.status != "ONLINE":
            return PoolStatus.FAILING_DEV
        return PoolStatus.FEAT_DISABLED

    @property
    def warning(self):
        """Something is to be done, and everything works."""
        return self.status_code in (PoolStatus.RESILVERING, PoolStatus.FEAT_DISABLED)

    @property
    def healthy(self):
        return self.status_code == PoolStatus.OK or self.warning

    @property
    def status_detail(self):
        text = self._status.get("status")
        return text and " ".join(text.split())

    def asdict(self, datasets_recursive=True):
        try:
            dataset = self.root_dataset.asdict(datasets_recursive)
        except ZFSException:
            dataset = None
        return {**self._fields(), "root_dataset": dataset, "status_code": self.status_code.name,
                "status_detail": self.status_detail}

    def _fields(self):
        return {
            "name": self.name,
            "id": self.name,
            "guid": str(self.guid),
            "hostname": self.hostname,
            "status": self.status,
            "healthy": self.healthy,
            "warning": self.warning,
            "error_count": self.error_count,
            "properties": {key: value.asdict() for key, value in self.properties.items()} or None,
            "features": self.features or None,
            "scan": self.scrub.asdict(),
            "root_vdev": self.root_vdev.asdict(False),
            "groups": {group: [vdev.asdict() for vdev in vdevs] for group, vdevs in self.groups.items()},
        }


class ZFSImportablePool(ZFSPool):
    """A pool that `zpool import` names."""

    def __init__(self, root, name, status):
        super().__init__(root, name, status, None)

    def asdict(self, datasets_recursive=True):
        del datasets_recursive
        return {**self._fields(), "root_dataset": None}


def _importable(text):
    """The pools in what `zpool import` prints, in the form of `zpool status -j`."""
    for block in re.split(r"^  pool: ", text, flags=re.MULTILINE)[1:]:
        head, _, config = block.partition("\nconfig:\n")
        name, *lines = head.split("\n")
        fields = dict(re.findall(r"^ *(id|state|status): (\S.*)$", "\n".join(lines), flags=re.MULTILINE))
        state = fields["state"].split(" ", 1)[0]
        pool = {"name": name, "pool_guid": fields["id"], "state": state}
        if "status" in fields:
            pool["status"] = fields["status"]
        trees = pool["vdevs"] = {}
        above = []
        for line in config.split("\n"):
            row = re.fullmatch(r"\t( *)(\S.*?)(?:  +(\S.*))?", line)
            if row is None:
                continue
            depth, found, told = len(row[1]) // 2, row[2], (row[3] or "ONLINE").split(" ", 1)[0]
            # A heading has no state. The pool has one, and may have the name of a heading.
            if depth == 0 and row[3] is None:
                trees = pool[found] = {}
                above = []
                continue
            # Names of devices are whole paths; groups have a number.
            group = re.fullmatch(r"(mirror|raidz)\d*-\d+", found)
            kind = "root" if depth == 0 else group[1] if group else _kind(found)
            vdev = {"name": found, "state": told, "vdev_type": kind, "vdevs": {}}
            if kind in ("disk", "file"):
                vdev["path"] = found
            # A heading has no row of its own that its devices would be below.
            level = depth if trees is pool["vdevs"] else depth - 1
            del above[level:]
            (above[-1]["vdevs"] if above else trees)[found] = vdev
            above.append(vdev)
        yield pool


def _kind(path):
    return "disk" if path.startswith("/dev/") else "file"


class ZFS:
    """All imported pools, as they are when they are first asked for."""

    def __init__(self, history=False, history_prefix=""):
        del history, history_prefix
        self._read = {}

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self._read.clear()

    def _once(self, what, read):
        if what not in self._read:
            self._read[what] = read()
        return self._read[what]

    @property
    def _pools(self):
        def read():
            states = _ask("pools", "zpool", "status", "-jp", "--json-int")
            shown = _ask("pools", "zpool", "get", "-j", "all")
            exact = _ask("pools", "zpool", "get", "-jp", "all")
            both = states.keys() & shown.keys() & exact.keys()
            return {
                name: ZFSPool(self, name, states[name],
                              _properties(shown[name]["properties"], exact[name]["properties"]))
                for name in sorted(both)
            }
        return self._once("pools", read)

    def _objects(self, kind, types):
        """File systems or snapshots with all their properties; those that were made between the two answers
        are left out."""
        shown = _ask("datasets", "zfs", "get", "-j", "-t", types, "all")
        exact = _ask("datasets", "zfs", "get", "-jp", "-t", types, "all")
        return {name: kind(self, name, shown[name], fields) for name, fields in exact.items() if name in shown}

    @property
    def _datasets(self):
        return self._once("datasets", lambda: self._objects(ZFSDataset, "filesystem"))

    @property
    def _snapshots(self):
        def read():
            found = {}
            snapshots = self._objects(ZFSSnapshot, "snapshot").values()
            for snapshot in sorted(snapshots, key=lambda snapshot: int(snapshot.properties["createtxg"].rawvalue)):
                found.setdefault(snapshot.name.split("@", 1)[0], []).append(snapshot)
            return found
        return self._once("snapshots", read)

    @property
    def pools(self):
        return iter(self._pools.values())

    @property
    def datasets(self):
        return iter(self._datasets.values())

    @property
    def snapshots(self):
        for snapshots in self._snapshots.values():
            yield from snapshots

    def get(self, name):
        if name not in self._pools:
            raise ZFSException(Error.NOENT, "Pool {} not found".format(name))
        return self._pools[name]

    def get_dataset(self, name):
        if name not in self._datasets:
            raise ZFSException(Error.NOENT, "Dataset {} not found".format(name))
        return self._datasets[name]

    def get_snapshot(self, name):
        for snapshot in self._snapshots.get(name.split("@", 1)[0], ()):
            if snapshot.name == name:
                return snapshot
        raise ZFSException(Error.NOENT, "Snapshot {} not found".format(name))

    def find_import(self, cachefile=None, name=None, destroyed=False, search_paths=None):
        """The pools that can be imported, destroyed ones with `destroyed` alone, as OpenZFS' command has it."""
        words = ["zpool", "import"]
        if destroyed:
            words.append("-D")
        if cachefile:
            words += ["-c", cachefile]
        for path in search_paths or ():
            if os.path.exists(path):
                words += ["-d", path]
        for pool in _importable(_run(*words)):
            if name is None or pool["name"] == name:
                yield ZFSImportablePool(self, pool["name"], pool)
