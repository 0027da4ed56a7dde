#!/usr/bin/env python3
"""crash.py load|check NAME FOLDER NUMBER DISK: operations whose outcome is durable once they are acknowledged, and the check after a crash that they are.

`load` works in FOLDER until its machine dies. Operation N is a function of NAME and N alone. After each, N is written to the block NUMBER of DISK, which loses nothing:
the acknowledgement. `check` compares FOLDER with the last acknowledged operation; the next one may have happened, in part or whole. Prints the first that is wrong."""
import os, random, shutil, sqlite3, struct, sys

MODE, NAME, FOLDER, NUMBER, DISK = sys.argv[1:]
KINDS, CHECKED = 6, 400


def content(operation, length=None):
    rng = random.Random(f"{NAME} {operation}")
    return rng.randbytes(length or rng.choice((1, 100, 4096, 5000, 30000, 150000)))


def path(name):
    return os.path.join(FOLDER, name)


def sync(name):
    file = os.open(path(name), os.O_RDONLY)
    os.fsync(file)
    os.close(file)


def write(name, data, flags=os.O_CREAT | os.O_TRUNC, offset=None):
    file = os.open(path(name), os.O_WRONLY | flags, 0o644)
    assert (os.write(file, data) if offset is None else os.pwrite(file, data, offset)) == len(data)
    os.fsync(file)
    os.close(file)


def perform(operation):
    kind = operation % KINDS
    if kind == 0:  # a new file; an old one goes
        write(f"file-{operation}", content(operation))
        if os.path.exists(path(f"file-{operation - 60}")):
            os.unlink(path(f"file-{operation - 60}"))
        sync(".")
    elif kind == 1:  # a file replaced by rename
        write("replaced.new", struct.pack("<Q", operation) + content(operation))
        os.rename(path("replaced.new"), path("replaced"))
        sync(".")
    elif kind == 2:  # appended to
        write("appended", b"%012d\n" % operation, os.O_CREAT | os.O_APPEND)
    elif kind == 3:  # a block overwritten in place
        write("blocks", struct.pack("<Q", operation) + content(operation, 4088), os.O_CREAT, operation // KINDS % 32 * 4096)
    elif kind == 4:  # a row of a database
        base = sqlite3.connect(path("base"), timeout=60)
        base.executescript("pragma synchronous=extra; create table if not exists t(n integer primary key, b blob)")
        base.execute("insert or replace into t values(?, ?)", (operation, content(operation, 700)))
        base.commit()
        base.close()
    else:  # a directory with a renamed file, a hard and a symbolic link; an old one goes
        name = f"folder-{operation}"
        shutil.rmtree(path(name), ignore_errors=True)
        os.mkdir(path(name))
        write(f"{name}/new", content(operation, 500))
        os.rename(path(f"{name}/new"), path(f"{name}/renamed"))
        os.link(path(f"{name}/renamed"), path(f"{name}/hard"))
        os.symlink("renamed", path(f"{name}/soft"))
        sync(name)
        shutil.rmtree(path(f"folder-{operation - 60}"), ignore_errors=True)
        sync(".")


def read(name):
    with open(path(name), "rb") as file:
        return file.read()


def need(condition, what):
    if not condition:
        raise AssertionError(what)


def check(last):
    """`last` is the last acknowledged operation."""
    recent = range(max(1, last - CHECKED), last + 1)
    appended, blocks = None, None
    for operation in recent:
        kind, is_last_of_kind = operation % KINDS, operation + KINDS > last
        if kind in (0, 5) and operation + 60 <= last:
            need(not os.path.lexists(path(f"{'file' if kind == 0 else 'folder'}-{operation}")), f"what {operation} made is back")
        # The next operation may have removed it already.
        elif kind == 0 and operation + 60 != last + 1:
            need(read(f"file-{operation}") == content(operation), f"file-{operation} differs")
        elif kind == 1 and is_last_of_kind:
            data = read("replaced")
            found = struct.unpack("<Q", data[:8])[0]
            need(found in (operation, last + 1) and data[8:] == content(found), f"the replaced file is that of {found}, not {operation}")
        elif kind == 2:
            appended = appended or read("appended")
            need(b"%012d\n" % operation in appended, f"the line {operation} is missing")
        elif kind == 3 and operation + 32 * KINDS > last:
            blocks = blocks or read("blocks")
            place = operation // KINDS % 32 * 4096
            found = struct.unpack("<Q", blocks[place:place + 8])[0]
            # The write after it may have been torn.
            need(operation + 32 * KINDS == last + 1 or found == operation and blocks[place + 8:place + 4096] == content(operation, 4088), f"the block of {operation} has {found}")
        elif kind == 5 and operation + 60 != last + 1:
            name = f"folder-{operation}"
            need(sorted(os.listdir(path(name))) == ["hard", "renamed", "soft"], f"{name} has {os.listdir(path(name))}")
            need(read(f"{name}/hard") == content(operation, 500) and os.stat(path(f"{name}/renamed")).st_nlink == 2, f"{name} differs")
            need(os.readlink(path(f"{name}/soft")) == "renamed", f"{name}/soft differs")
    rows = [operation for operation in recent if operation % KINDS == 4]
    if rows:
        base = sqlite3.connect(path("base"))
        need(base.execute("pragma integrity_check").fetchone()[0] == "ok", "the database is damaged")
        found = dict(base.execute("select n, b from t where n >= ?", (rows[0],)))
        for operation in rows:
            need(found.get(operation) == content(operation, 700), f"the row {operation} is missing or differs")


disk = os.open(DISK, os.O_RDWR | os.O_SYNC)
place = int(NUMBER) * 4096
last = struct.unpack("<Q", os.pread(disk, 8, place))[0]
if MODE == "check":
    check(last)
    print(last)
    sys.exit()
while True:
    perform(last + 1)
    last += 1
    os.pwrite(disk, struct.pack("<Q", last), place)
