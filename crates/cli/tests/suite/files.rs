//! Single files with long paths, direct I/O, holes, attributes and set-id bits behave as natively.

use crate::mounting::{Fixture, as_root, needs, sh};
use rustix::fs::{AtFlags, Mode, OFlags};
use std::fs;
use std::io::{Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

#[test]
fn paths_longer_than_path_max() {
    needs!(as_root());
    let fixture = Fixture::mirror(&[]);
    // The longest path that one call may name, and directories below it that only steps can reach.
    let name = "n".repeat(200);
    let mut path = fixture.mountpoint.clone();
    while path.as_os_str().len() + 201 < 4095 {
        path.push(&name);
        fs::create_dir(&path).unwrap();
    }
    path.push("f".repeat(4095 - path.as_os_str().len() - 1));
    assert_eq!(path.as_os_str().len(), 4095);
    fs::write(&path, "deep").unwrap();
    assert_eq!(fs::read(&path).unwrap(), b"deep");
    fs::remove_file(&path).unwrap();
    path.pop();
    let mut at = rustix::fs::open(&path, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
    for _ in 0..30 {
        rustix::fs::mkdirat(&at, &name, Mode::from_raw_mode(0o755)).unwrap();
        at = rustix::fs::openat(&at, &name, OFlags::PATH | OFlags::DIRECTORY, Mode::empty()).unwrap();
    }
    let file = rustix::fs::openat(&at, "file", OFlags::CREATE | OFlags::RDWR, Mode::from_raw_mode(0o644)).unwrap();
    rustix::io::write(&file, b"deeper").unwrap();
    rustix::fs::renameat(&at, "file", &at, "moved").unwrap();
    assert_eq!(rustix::fs::statat(&at, "moved", AtFlags::empty()).unwrap().st_size, 6);
    sh(&fixture.mountpoint, "rm -rf nnn*");
    assert_eq!(fs::read_dir(&fixture.source).unwrap().count(), 0);
}

/// Writes a file by io_submit(2) with O_DIRECT repeatedly, while another process reads it, and
/// compares the content afterwards.
const ASYNCHRONOUS: &str = r"
import ctypes, mmap, os, platform, signal, struct, sys
setup, getevents, submit = {'x86_64': (206, 208, 209)}.get(platform.machine(), (0, 4, 2))
call = ctypes.CDLL(None, use_errno=True).syscall
size, path = 655360, sys.argv[1]
context = ctypes.c_ulong(0)
assert call(setup, 4, ctypes.byref(context)) == 0
direct = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT)
buffered = os.open(path, os.O_RDONLY)
readers, parent = [], os.getpid()
for _ in range(2):
    reader = os.fork()
    if reader == 0:
        while os.getppid() == parent:
            os.pread(buffered, size, 0)
    readers.append(reader)
space = mmap.mmap(-1, size)
buffer = (ctypes.c_char * size).from_buffer(space)
stale, number = 0, 0
while number < 40 and not stale:
    number += 1
    space[:] = bytes([number % 250 + 1]) * size
    block = ctypes.create_string_buffer(struct.pack('<QIIHhIQQqQII', 1, 0, 0, 1, 0, direct, ctypes.addressof(buffer), size, 0, 0, 0, 0))
    blocks = (ctypes.c_void_p * 1)(ctypes.addressof(block))
    assert call(submit, context, ctypes.c_long(1), blocks) == 1, ctypes.get_errno()
    event = ctypes.create_string_buffer(32)
    assert call(getevents, context, ctypes.c_long(1), ctypes.c_long(1), event, None) == 1
    assert struct.unpack('<QQqq', event.raw)[2] == size
    stale += os.pread(buffered, size, 0) != space[:]
for reader in readers:
    os.kill(reader, signal.SIGKILL)
    os.waitpid(reader, 0)
print(number)
sys.exit(stale)
";

#[test]
fn asynchronous_direct_writes_are_seen_by_buffered_readers() {
    needs!(as_root());
    for options in [&[][..], crate::mounting::without_passthrough()] {
        let fixture = Fixture::mirror(options);
        let output = std::process::Command::new("python3").args(["-c", ASYNCHRONOUS]).arg(fixture.at("file")).output();
        let Ok(output) = output else {
            crate::mounting::skip("asynchronous writes", "python3 is not installed");
            return;
        };
        let said = crate::mounting::text(&output.stderr);
        assert!(output.status.success(), "{options:?}: {} {said}", crate::mounting::text(&output.stdout));
    }
}

#[test]
fn direct_io_of_any_alignment() {
    needs!(as_root());
    for options in [&[][..], crate::mounting::without_passthrough(), &["--forward-odirect=4096"], &["--direct-io"]] {
        let content: Vec<u8> = (0..100_000u32).map(|index| (index / 7) as u8).collect();
        let fixture = Fixture::mirror_of(options, |source| fs::write(source.join("file"), &content).unwrap());
        let file = rustix::fs::open(fixture.at("file"), OFlags::RDWR | OFlags::DIRECT, Mode::empty()).unwrap();
        let native = rustix::fs::open(fixture.below("file"), OFlags::RDWR | OFlags::DIRECT, Mode::empty());
        for (offset, size) in [(0, 4096), (512, 512), (1, 1), (4095, 3), (10_001, 12_345), (99_999, 100)] {
            // Whether the storage accepts a read depends on the place of the buffer, too: the same
            // one for both.
            let mut space = vec![0; size + 4096];
            let start = space.as_ptr().align_offset(4096);
            let direct =
                native.as_ref().map(|native| rustix::io::pread(native, &mut space[start..start + size], offset));
            space.fill(0);
            let through = rustix::io::pread(&file, &mut space[start..start + size], offset);
            let buffer = &space[start..start + size];
            match through {
                Ok(read) => {
                    let start = offset as usize;
                    assert_eq!(read, size.min(100_000 - start), "{options:?} at {offset}");
                    assert_eq!(buffer[..read], content[start..start + read], "{options:?} at {offset}");
                }
                // Where the kernel does the I/O itself, it asks for the alignment that the source
                // asks for.
                Err(error) => assert_eq!(Some(Err(error)), direct.ok(), "{options:?} at {offset}"),
            }
        }
    }
}

#[test]
fn a_large_sparse_file() {
    needs!(as_root());
    for options in [&[][..], crate::mounting::without_passthrough()] {
        let fixture = Fixture::mirror(options);
        let mut file =
            fs::File::options().read(true).write(true).create(true).truncate(true).open(fixture.at("file")).unwrap();
        file.seek(SeekFrom::Start(5 << 32)).unwrap();
        file.write_all(b"far").unwrap();
        assert_eq!(fs::metadata(fixture.at("file")).unwrap().len(), (5 << 32) + 3);
        assert!(fs::metadata(fixture.at("file")).unwrap().blocks() < 1_000);
        let mut buffer = [1; 3];
        file.seek(SeekFrom::Start((5 << 32) - 3)).unwrap();
        file.read_exact(&mut buffer).unwrap();
        assert_eq!(buffer, [0; 3]);
    }
}

/// A log that may only be appended to (`chattr +a`) is appended to, and nothing else, through every
/// layer.
#[test]
fn an_append_only_file_is_appended_to() {
    needs!(as_root());
    let script = |view: &Path, below: &Path| {
        let script = "set +e; echo one >$BELOW; chattr +a $BELOW || exit 9; echo two >>$VIEW; echo \"appended: $?\"
            exec 3>>$VIEW; echo three >&3; echo four >&3; exec 3>&-
            (: >$VIEW) 2>/dev/null; echo \"emptied: $?\"; (echo five 1<>$VIEW) 2>/dev/null || echo \"not overwritten\"
            rm -f $VIEW 2>/dev/null; echo \"removed: $?\"; cat $VIEW; chattr -a $BELOW; cat $BELOW";
        let script = script.replace("$VIEW", view.to_str().unwrap()).replace("$BELOW", below.to_str().unwrap());
        sh(Path::new("/"), &script)
    };
    let bare = Fixture::bare();
    let natively = script(&bare.below("log"), &bare.below("log"));
    assert!(
        natively.starts_with("appended: 0\nemptied: 2\nnot overwritten\nremoved: 1\none\ntwo\nthree\nfour\n"),
        "{natively}"
    );
    let mirrors = [&[][..], crate::mounting::without_passthrough()].map(Fixture::mirror);
    let cages = ["--size=8G", "--size=1M"].map(|size| Fixture::cage(&[size]));
    for fixture in mirrors.iter().chain(&cages) {
        assert_eq!(script(&fixture.at("log"), &fixture.below("log")), natively);
    }
    let (union, upper) = crate::mounting::unions::over(&[], |_| ());
    assert_eq!(script(&union.at("log"), &upper.join("log")), natively);
}

/// A change of content or owner has the same effect on set-id bits on every layer as on the
/// directory itself, for root and for the owner, who is in the file's group or not.
#[test]
fn set_id_bits_go_and_stay_as_natively() {
    needs!(as_root());
    let script = |view: &Path| {
        // Changes are made side by side, each to a file of its own: a is the first one's.
        let script = r#"
            umask 0; set +e; printf %8192s x >source
            all="a b c d e f g h i j k l m n o p q"
            for mode in 6777 2644 4755; do for user in 0 1000; do for group in 1000 2000; do
                rm -f $all; for file in $all; do [ $file = p ] || [ $file = q ] || cp source $file; done
                mknod p p; mknod q c 1 3; chown 1000:1000 $all; chmod $mode $all
                setpriv --reuid $user --regid 2000 --groups $group sh -c '
                    printf x >>a; printf x 1<>b; : >c; truncate -s 3 d; truncate -s 8192 e; fallocate -l 16384 f; fallocate -n -l 16384 g
                    fallocate -p -l 4096 h; fallocate -z -l 4096 i; xfs_io -c "copy_range -l 100 source" j; xfs_io -d -c "pwrite -q 0 4096" k
                    chown 1000 l; chown :2000 m; chown "" n; touch o; chown :2000 p; chown "" q'
                echo "$mode $user $group: $(stat -c %n%a $all | tr '\n' ' ')"
            done; done; done"#;
        let told = sh(view, script);
        let nameless = rustix::fs::open(view, OFlags::TMPFILE | OFlags::RDWR, Mode::from_raw_mode(0o6711)).unwrap();
        rustix::io::write(&nameless, b"x").unwrap();
        format!("{told}nameless: {:o}", rustix::fs::fstat(&nameless).unwrap().st_mode)
    };
    let open = |directory: &Path| fs::set_permissions(directory, fs::Permissions::from_mode(0o777)).unwrap();
    let bare = Fixture::bare();
    let natively = script(&bare.source);
    assert!(natively.contains("2644 1000 1000: a2644 ") && natively.contains("4755 0 1000: a4755 "), "{natively}");
    let mirrors = [&[][..], crate::mounting::without_passthrough()].map(Fixture::mirror);
    for fixture in mirrors.iter().chain([&Fixture::cage(&["--size=8G"])]) {
        open(&fixture.source);
        assert_eq!(script(&fixture.mountpoint), natively);
    }
    let (union, upper) = crate::mounting::unions::over(&[], |_| ());
    open(&upper);
    assert_eq!(script(&union.mountpoint), natively);
    let (pool, image) = (format!("hostile{}", std::process::id()), bare.scratch.path().join("image"));
    let made = bare.nacre([
        "pool",
        "create",
        "--size",
        "256M",
        "-m",
        bare.mountpoint.to_str().unwrap(),
        &pool,
        image.to_str().unwrap(),
    ]);
    assert!(made.status.success(), "{}", crate::mounting::text(&made.stderr));
    open(&bare.mountpoint);
    let told = script(&bare.mountpoint);
    assert!(bare.nacre(["pool", "export", &pool]).status.success());
    assert_eq!(told, natively);
}
