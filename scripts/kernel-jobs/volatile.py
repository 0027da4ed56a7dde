#!/usr/bin/env python3
"""volatile.py DEVICE NBD: NBD is a disk on DEVICE with a write cache that a power cut loses: it lies in the memory of this process, which dies with its machine.

A write goes to the cache, or, one in four, at once to DEVICE, so that after a cut any subset of the writes since the last flush is there. A flush, and a write with
FUA, are answered when DEVICE has them. Serves the kernel's nbd driver by a socket pair until NBD is disconnected."""
import fcntl, os, random, socket, struct, sys, threading

SET_SOCK, SET_BLKSIZE, DO_IT, CLEAR_SOCK, SET_SIZE_BLOCKS, SET_FLAGS = 0xAB00, 0xAB01, 0xAB03, 0xAB04, 0xAB07, 0xAB0A
HAS_FLAGS, SEND_FLUSH, SEND_FUA, SEND_TRIM = 1, 4, 8, 32
READ, WRITE, DISCONNECT, FLUSH, TRIM = range(5)
FUA = 1 << 16
BLOCK = 512


def receive(connection, length):
    data = bytearray()
    while len(data) < length:
        piece = connection.recv(length - len(data))
        if not piece:
            sys.exit()
        data += piece
    return bytes(data)


class Disk:
    def __init__(self, path):
        self.file = os.open(path, os.O_RDWR)
        self.cache = {}

    def write(self, data, offset, now):
        for place in range(0, len(data), BLOCK):
            self.cache.pop(offset + place, None) if now else self.cache.update({offset + place: data[place:place + BLOCK]})
        if now:
            os.pwrite(self.file, data, offset)

    def read(self, length, offset):
        data = bytearray(os.pread(self.file, length, offset))
        for place in range(0, length, BLOCK):
            if kept := self.cache.get(offset + place):
                data[place:place + BLOCK] = kept
        return bytes(data)

    def flush(self):
        for offset, data in self.cache.items():
            os.pwrite(self.file, data, offset)
        self.cache.clear()
        os.fdatasync(self.file)


def serve(connection, disk):
    while True:
        magic, kind, handle, offset, length = struct.unpack(">II8sQI", receive(connection, 28))
        assert magic == 0x25609513
        data = b""
        if kind & 0xFFFF == READ:
            data = disk.read(length, offset)
        elif kind & 0xFFFF == WRITE:
            disk.write(receive(connection, length), offset, random.random() < 0.25)
            if kind & FUA:
                disk.flush()
        elif kind & 0xFFFF == FLUSH:
            disk.flush()
        elif kind & 0xFFFF == DISCONNECT:
            disk.flush()
            return
        connection.sendall(struct.pack(">II8s", 0x67446698, 0, handle) + data)


def main():
    path, name = sys.argv[1:]
    size = int(open(f"/sys/class/block/{os.path.basename(path)}/size").read()) * BLOCK
    ours, kernels = socket.socketpair()
    nbd = os.open(name, os.O_RDWR)
    for request, argument in ((CLEAR_SOCK, 0), (SET_BLKSIZE, BLOCK), (SET_SIZE_BLOCKS, size // BLOCK), (SET_FLAGS, HAS_FLAGS | SEND_FLUSH | SEND_FUA), (SET_SOCK, kernels.fileno())):
        fcntl.ioctl(nbd, request, argument)
    threading.Thread(target=serve, args=(ours, Disk(path)), daemon=True).start()
    fcntl.ioctl(nbd, DO_IT)


main()
