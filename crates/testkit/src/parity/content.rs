//! Parity of calls about content.

use super::{Case, Log};
use rustix::fs::{Advice, FallocateFlags, FlockOperation, OFlags, SeekFrom};
use std::os::fd::AsFd;

pub(super) const CASES: &[Case] = &[
    ("reading and writing", reading_and_writing),
    ("vectors", vectors),
    ("reading without waiting", without_waiting),
    ("appending", appending),
    ("appending no longer", appending_no_longer),
    ("truncation", truncation),
    ("fallocate", fallocate),
    ("ranges collapsed and inserted", ranges_moved),
    ("data and holes", holes),
    ("copy_file_range", copies),
    ("sendfile and splice", sendfile),
    ("direct I/O", direct),
    ("access modes", access_modes),
    ("durability", durability),
    ("flock", flocks),
    ("ioctl", ioctls),
    ("limits of offsets", limits),
];

fn reading_and_writing(log: &mut Log) {
    let file = log.file("file", b"0123456789");
    let mut buffer = [0; 16];
    for offset in [0, 5, 10, 11, 1 << 40] {
        let read = rustix::io::pread(&file, &mut buffer, offset);
        log.saw(&format!("pread at {offset}"), read);
    }
    let written = rustix::io::pwrite(&file, b"end", 5_000);
    log.saw("pwrite", written);
    log.stat("file");
    log.content("file");
    let written = rustix::io::pwrite(&file, b"", 9_000);
    log.saw("empty pwrite", written);
    log.stat("file");
    for whence in [SeekFrom::End(-3), SeekFrom::Start(2), SeekFrom::Current(4)] {
        let position = rustix::fs::seek(&file, whence);
        log.saw("seek", position);
        let read = rustix::io::read(&file, &mut buffer);
        log.saw("read", read);
    }
    let position = rustix::fs::seek(&file, SeekFrom::Current(-100_000));
    log.saw("seek before the start", position);
    let mark = log.mark("file");
    rustix::io::pwrite(&file, b"x", 0).expect("write");
    drop(file);
    log.moved("write", "file", mark);
    log.open("file", OFlags::RDONLY, 0);
    log.content("file");
}

fn vectors(log: &mut Log) {
    let file = log.file("file", b"");
    let written = rustix::io::pwritev(
        &file,
        &[std::io::IoSlice::new(b"one "), std::io::IoSlice::new(b""), std::io::IoSlice::new(b"two")],
        3,
    );
    log.saw("pwritev", written);
    let (mut a, mut b) = ([0; 5], [0; 20]);
    let read = rustix::io::preadv(&file, &mut [std::io::IoSliceMut::new(&mut a), std::io::IoSliceMut::new(&mut b)], 0);
    log.saw("preadv", read);
    log.say(format!("{a:?} {b:?}"));
    let written = rustix::io::pwritev2(&file, &[std::io::IoSlice::new(b"end")], 0, rustix::io::ReadWriteFlags::APPEND);
    log.saw("pwritev2 appending", written);
    log.content("file");
}

fn without_waiting(log: &mut Log) {
    let file = log.file("file", b"content");
    let mut buffer = [0; 5];
    let read =
        rustix::io::preadv2(&file, &mut [std::io::IoSliceMut::new(&mut buffer)], 0, rustix::io::ReadWriteFlags::NOWAIT);
    log.saw("preadv2 without waiting, cached", read);
}

fn appending(log: &mut Log) {
    log.file("file", b"start");
    let Some(one) = log.open("file", OFlags::WRONLY | OFlags::APPEND, 0) else { return };
    let Some(two) = log.open("file", OFlags::RDWR | OFlags::APPEND, 0) else { return };
    for round in 0..5 {
        rustix::io::write(&one, format!(" one{round}").as_bytes()).expect("write");
        rustix::io::write(&two, format!(" two{round}").as_bytes()).expect("write");
    }
    let written = rustix::io::pwrite(&one, b" at the end all the same", 0);
    log.saw("pwrite on an appending file", written);
    log.content("file");
    // Only the current value of the flag matters.
    let Some(three) = log.open("file", OFlags::RDWR, 0) else { return };
    let set = rustix::fs::fcntl_setfl(&three, OFlags::APPEND);
    log.did("fcntl sets O_APPEND", set);
    rustix::io::write(&one, b" one").expect("write");
    let written = rustix::io::write(&three, b" three");
    log.saw("write on a file that appends by now", written);
    log.content("file");
    let cleared = rustix::fs::fcntl_setfl(&three, OFlags::empty());
    log.did("fcntl clears O_APPEND", cleared);
    let written = rustix::io::pwrite(&three, b"START", 0);
    log.saw("pwrite on a file that appends no longer", written);
    log.content("file");
    log.stat("file");
}

fn appending_no_longer(log: &mut Log) {
    log.file("file", b"start");
    let Some(file) = log.open("file", OFlags::RDWR | OFlags::APPEND, 0) else { return };
    let cleared = rustix::fs::fcntl_setfl(&file, OFlags::empty());
    log.did("fcntl clears the O_APPEND of open", cleared);
    let written = rustix::io::pwrite(&file, b"START", 0);
    log.saw("pwrite on a file opened for appending that appends no longer", written);
    log.content("file");
}

fn truncation(log: &mut Log) {
    let file = log.file("file", &[b'x'; 10_000]);
    for size in [5_000, 5_001, 0, 70_000, 4_096, 1 << 33] {
        let cut = rustix::fs::ftruncate(&file, size);
        log.did(&format!("ftruncate {size}"), cut);
        log.stat("file");
    }
    rustix::fs::ftruncate(&file, 5_000).expect("ftruncate");
    log.content("file");
    let cut = rustix::fs::ftruncate(&file, u64::MAX >> 1);
    log.did("ftruncate to the largest offset", cut);
    let read_only = log.open("file", OFlags::RDONLY, 0);
    if let Some(read_only) = read_only {
        let cut = rustix::fs::ftruncate(&read_only, 1);
        log.did("ftruncate of a file opened for reading", cut);
    }
    let mark = log.mark("file");
    rustix::fs::ftruncate(&file, 4_000).expect("ftruncate");
    log.moved("ftruncate", "file", mark);
    log.open("file", OFlags::WRONLY | OFlags::TRUNC, 0);
    log.stat("file");
}

fn fallocate(log: &mut Log) {
    let file = log.file("file", &[b'x'; 20_000]);
    let (keep, punch) = (FallocateFlags::KEEP_SIZE, FallocateFlags::PUNCH_HOLE);
    for (flags, offset, length) in [
        (FallocateFlags::empty(), 0, 30_000),
        (keep, 30_000, 100_000),
        (keep | punch, 4_096, 8_192),
        (keep | punch, 100, 200),
        (punch, 0, 4_096),
        (FallocateFlags::ZERO_RANGE, 10_000, 5_000),
        (FallocateFlags::ZERO_RANGE | keep, 40_000, 5_000),
        (FallocateFlags::empty(), 0, 0),
        (FallocateFlags::from_bits_retain(1 << 20), 0, 10),
    ] {
        let answer = rustix::fs::fallocate(&file, flags, offset, length);
        log.did(&format!("fallocate {} {offset} {length}", flags.bits()), answer);
        log.stat("file");
    }
    log.content("file");
    if let Some(read_only) = log.open("file", OFlags::RDONLY, 0) {
        let answer = rustix::fs::fallocate(&read_only, FallocateFlags::empty(), 0, 10);
        log.did("fallocate of a file opened for reading", answer);
    }
}

fn ranges_moved(log: &mut Log) {
    let file = log.file("file", &[b'x'; 20_000]);
    for (flags, offset, length) in [
        (FallocateFlags::COLLAPSE_RANGE, 4_096, 4_096),
        (FallocateFlags::INSERT_RANGE, 4_096, 4_096),
        (FallocateFlags::COLLAPSE_RANGE, 1, 1),
    ] {
        let answer = rustix::fs::fallocate(&file, flags, offset, length);
        log.did(&format!("fallocate {} {offset} {length}", flags.bits()), answer);
        log.stat("file");
    }
    log.content("file");
}

fn holes(log: &mut Log) {
    let file = log.file("file", b"");
    rustix::io::pwrite(&file, &[b'x'; 4096], 1 << 20).expect("write");
    rustix::io::pwrite(&file, &[b'x'; 4096], 3 << 20).expect("write");
    rustix::fs::fsync(&file).expect("fsync");
    for offset in [0, 1 << 20, (1 << 20) + 100, 2 << 20, 3 << 20, (3 << 20) + 4_096, 1 << 40] {
        let data = rustix::fs::seek(&file, SeekFrom::Data(offset));
        log.saw(&format!("data from {offset}"), data);
        let hole = rustix::fs::seek(&file, SeekFrom::Hole(offset));
        log.saw(&format!("hole from {offset}"), hole);
    }
    drop(file);
    log.file("empty", b"");
    if let Some(file) = log.open("empty", OFlags::RDONLY, 0) {
        let data = rustix::fs::seek(&file, SeekFrom::Data(0));
        log.saw("data in an empty file", data);
    }
}

fn copies(log: &mut Log) {
    let content: Vec<u8> = (0..50_000u32).map(|index| ((index * 7) >> 3) as u8).collect();
    let from = log.file("from", &content);
    let to = log.file("to", b"head");
    let (mut a, mut b) = (10, 4);
    let mut left = 30_000;
    while left > 0 {
        match rustix::fs::copy_file_range(&from, Some(&mut a), &to, Some(&mut b), left) {
            Ok(0) => break,
            Ok(size) => left -= size,
            Err(error) => {
                log.say(format!("copy: {error}"));
                break;
            }
        }
    }
    log.say(format!("left {left}, offsets {a} {b}"));
    log.content("to");
    let copied = rustix::fs::copy_file_range(&from, Some(&mut 50_000), &to, Some(&mut 0), 10);
    log.saw("copy from the end", copied);
    let overlapping = rustix::fs::copy_file_range(&from, Some(&mut 0), &from, Some(&mut 100), 1_000);
    log.saw("copy onto itself", overlapping);
    if let Some(read_only) = log.open("to", OFlags::RDONLY, 0) {
        let copied = rustix::fs::copy_file_range(&from, Some(&mut 0), &read_only, Some(&mut 0), 10);
        log.saw("copy to a file opened for reading", copied);
    }
    let copied = std::fs::copy(log.at("from"), log.at("copy")).map_err(|e| e.raw_os_error());
    log.say(format!("std::fs::copy {copied:?}"));
    log.content("copy");
}

fn sendfile(log: &mut Log) {
    let from = log.file("from", &[b'y'; 100_000]);
    let to = log.file("to", b"");
    let mut offset = 1_000;
    let sent = rustix::fs::sendfile(&to, &from, Some(&mut offset), 50_000);
    log.saw("sendfile", sent);
    log.content("to");
    let (reader, writer) = rustix::pipe::pipe().expect("pipe");
    let flags = rustix::pipe::SpliceFlags::empty();
    let spliced = rustix::pipe::splice(&from, Some(&mut 0), &writer, None, 4_096, flags);
    log.saw("splice from a file", spliced);
    let spliced = rustix::pipe::splice(&reader, None, &to, Some(&mut 60_000), 4_096, flags);
    log.saw("splice to a file", spliced);
    log.content("to");
}

fn direct(log: &mut Log) {
    log.file("file", &[b'z'; 16_384]);
    let Some(file) = log.open("file", OFlags::RDWR | OFlags::DIRECT, 0) else { return };
    // An aligned buffer without unsafe code: take an aligned part of a larger one.
    let mut space = vec![0u8; 16_384];
    let start = space.as_ptr().align_offset(4_096);
    let aligned = &mut space[start..start + 8_192];
    let read = rustix::io::pread(&file, &mut aligned[..4_096], 4_096);
    log.saw("aligned read", read);
    aligned.fill(b'd');
    let written = rustix::io::pwrite(&file, &aligned[..4_096], 8_192);
    log.saw("aligned write", written);
    drop(file);
    log.content("file");
}

fn access_modes(log: &mut Log) {
    log.file("file", b"content");
    let mut buffer = [0; 4];
    if let Some(file) = log.open("file", OFlags::WRONLY, 0) {
        let read = rustix::io::read(&file, &mut buffer);
        log.saw("read of a file opened for writing", read);
    }
    if let Some(file) = log.open("file", OFlags::RDONLY, 0) {
        let written = rustix::io::write(&file, b"x");
        log.saw("write to a file opened for reading", written);
    }
    log.mkdir("d");
    if let Some(directory) = log.open("d", OFlags::RDONLY, 0) {
        let read = rustix::io::read(&directory, &mut buffer);
        log.saw("read of a directory", read);
    }
    if let Some(file) = log.open("file", OFlags::PATH, 0) {
        let read = rustix::io::read(&file, &mut buffer);
        log.saw("read of a path descriptor", read);
        let flags = rustix::fs::fcntl_getfl(&file).map(|flags| flags.contains(OFlags::PATH));
        log.saw("flags", flags);
    }
}

fn durability(log: &mut Log) {
    let file = log.file("file", b"content");
    let answer = rustix::fs::fsync(&file);
    log.did("fsync", answer);
    let answer = rustix::fs::fdatasync(&file);
    log.did("fdatasync", answer);
    let answer = rustix::fs::fadvise(&file, 0, None, Advice::DontNeed);
    log.did("fadvise", answer);
    let answer = rustix::fs::syncfs(&file);
    log.did("syncfs", answer);
    if let Some(directory) = log.open("", OFlags::RDONLY | OFlags::DIRECTORY, 0) {
        let answer = rustix::fs::fsync(&directory);
        log.did("fsync of a directory", answer);
        let answer = rustix::fs::fdatasync(&directory);
        log.did("fdatasync of a directory", answer);
    }
    log.content("file");
}

fn flocks(log: &mut Log) {
    let one = log.file("file", b"");
    let Some(two) = log.open("file", OFlags::RDONLY, 0) else { return };
    let steps = [
        (one.as_fd(), "one", FlockOperation::NonBlockingLockExclusive),
        (two.as_fd(), "two", FlockOperation::NonBlockingLockShared),
        (one.as_fd(), "one", FlockOperation::NonBlockingLockShared),
        (two.as_fd(), "two", FlockOperation::NonBlockingLockShared),
        (one.as_fd(), "one", FlockOperation::NonBlockingLockExclusive),
        (one.as_fd(), "one", FlockOperation::Unlock),
        (two.as_fd(), "two", FlockOperation::NonBlockingLockExclusive),
    ];
    for (file, who, what) in steps {
        let answer = rustix::fs::flock(file, what);
        log.did(&format!("{who} {what:?}"), answer);
    }
    drop(two);
    // The kernel notifies a FUSE file system of the last close without waiting for it.
    let mut answer = rustix::fs::flock(&one, FlockOperation::NonBlockingLockExclusive);
    for _ in 0..1_000 {
        if answer.is_ok() {
            break;
        }
        std::thread::sleep(std::time::Duration::from_millis(1));
        answer = rustix::fs::flock(&one, FlockOperation::NonBlockingLockExclusive);
    }
    log.did("one after two closed", answer);
    let answer = rustix::fs::fcntl_lock(&one, FlockOperation::NonBlockingLockExclusive);
    log.did("fcntl lock", answer);
    let answer = rustix::fs::fcntl_lock(&one, FlockOperation::Unlock);
    log.did("fcntl unlock", answer);
}

fn ioctls(log: &mut Log) {
    let file = log.file("file", b"content");
    let readable = rustix::io::ioctl_fionread(&file);
    log.saw("FIONREAD", readable);
    let tty = rustix::termios::isatty(&file);
    log.say(format!("isatty {tty}"));
}

fn limits(log: &mut Log) {
    let file = log.file("file", b"");
    for offset in [u64::MAX >> 1, (u64::MAX >> 1) - 1, 1 << 62] {
        let written = rustix::io::pwrite(&file, b"xy", offset);
        log.saw(&format!("pwrite at {offset}"), written);
    }
    let mut buffer = [0; 2];
    let read = rustix::io::pread(&file, &mut buffer, u64::MAX >> 1);
    log.saw("pread at the largest offset", read);
    log.stat("file");
}
