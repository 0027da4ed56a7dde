# Stores into a mapping of a file that is one hole, and copies it meanwhile by cp and tar -S. Fails where a store is not in a copy.
import mmap, os, subprocess, sys

path = sys.argv[1]
file = os.open(path, os.O_RDWR)
pages = mmap.mmap(file, os.fstat(file).st_size)
for place in range(12345, len(pages), 1 << 20):
    pages[place:place + 6] = b"stored"
subprocess.run(["cp", path, "/tmp/copy"], check=True)
# It says so where the time of a store arrived meanwhile.
subprocess.run(["tar", "-S", "-cf", "/tmp/copy.tar", path])
subprocess.run(["tar", "-C", "/tmp", "-xf", "/tmp/copy.tar"], check=True)
for copy in ["/tmp/copy", os.path.join("/tmp", path)]:
    with open(copy, "rb") as content:
        assert content.read() == pages[:], copy + " lacks what was stored"
