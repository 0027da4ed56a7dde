#!/usr/bin/env python3
"""seek.py FOLDER OPERATIONS: 8 processes mix lseek, write, truncate, close and utimes on files of their own and on shared ones. Each compares its own file with a
copy in memory: no data may lie in what lseek(2) calls a hole, and nothing may be lost."""
import errno, multiprocessing, os, random, sys

FOLDER, OPERATIONS, PROCESSES, LENGTH = sys.argv[1], int(sys.argv[2]), 8, 1 << 18
KERNEL = tuple(int(number) for number in os.uname().release.split(".")[:2])


def seek(fd, offset, whence):
    try:
        return os.lseek(fd, offset, whence)
    except OSError as error:
        if error.errno != errno.ENXIO:
            raise
        return None


def check_seek(fd, model, rng):
    offset = rng.randrange(LENGTH)
    data, end = seek(fd, offset, os.SEEK_DATA), len(model)
    if data is None:
        assert not any(model[offset:]), f"no data after {offset} of {end}"
        return
    assert offset <= data < end and not any(model[offset:data]), f"data at {offset} of {end} was called a hole up to {data}"
    hole = seek(fd, data, os.SEEK_HOLE)
    assert hole is not None and data <= hole <= end, f"hole after {data} of {end} is at {hole}"
    if hole == data:  # Before Linux 6.18 a file is data up to its end until it has been written back, which may have happened in between.
        after = seek(fd, data, os.SEEK_DATA)
        assert KERNEL < (6, 18) and after != data and not any(model[data:after]), f"at {data} of {end} are data and a hole up to {after}"


def mix(number):
    rng, model = random.Random(number), bytearray()
    path = f"{FOLDER}/own{number}"
    fd = os.open(path, os.O_RDWR | os.O_CREAT)
    for _ in range(OPERATIONS // PROCESSES):
        what = rng.randrange(8)
        if what < 2:
            offset, data = rng.randrange(LENGTH), rng.randbytes(rng.randrange(1, 9000))
            os.pwrite(fd, data, offset)
            model.extend(bytes(max(0, offset + len(data) - len(model))))
            model[offset:offset + len(data)] = data
        elif what == 2:
            length = rng.randrange(LENGTH)
            os.ftruncate(fd, length)
            del model[length:]
            model.extend(bytes(length - len(model)))
        elif what == 3:
            os.close(fd)
            fd = os.open(path, os.O_RDWR)
        elif what == 4:
            os.utime(path, (rng.randrange(1 << 30), rng.randrange(1 << 30)))
        elif what == 5:
            shared = os.open(f"{FOLDER}/shared{rng.randrange(4)}", os.O_RDWR | os.O_CREAT)
            os.pwrite(shared, rng.randbytes(5000), rng.randrange(LENGTH))
            seek(shared, rng.randrange(LENGTH), rng.choice((os.SEEK_DATA, os.SEEK_HOLE)))
            os.close(shared)
        else:
            check_seek(fd, model, rng)
    found = os.pread(fd, LENGTH * 2, 0)
    assert found == bytes(model), f"{path}: {len(found)} bytes, {len(model)} were written"


if __name__ == "__main__":
    processes = [multiprocessing.Process(target=mix, args=(number,)) for number in range(PROCESSES)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    sys.exit(any(process.exitcode for process in processes))
