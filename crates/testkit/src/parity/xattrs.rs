//! Parity of calls about extended attributes.

use super::{Case, Log};
use rustix::fs::XattrFlags;

pub(super) const CASES: &[Case] =
    &[("extended attributes", xattrs), ("extended attributes of other namespaces", namespaces)];

fn set(log: &mut Log, name: &str, key: &str, value: &[u8], flags: XattrFlags) {
    let answer = rustix::fs::lsetxattr(log.at(name), key, value, flags);
    log.did(&format!("setxattr {name} {key} {} {}", value.len(), flags.bits()), answer);
}

fn get(log: &mut Log, name: &str, key: &str, room: usize) {
    let mut buffer = vec![0; room];
    let answer = rustix::fs::lgetxattr(log.at(name), key, &mut buffer[..]);
    log.saw(&format!("getxattr {name} {key} into {room}"), answer);
    buffer.truncate(64);
    log.say(buffer.escape_ascii().to_string());
}

fn list(log: &mut Log, name: &str) {
    let mut buffer = vec![0; 4096];
    if let Some(size) = log.did("listxattr", rustix::fs::llistxattr(log.at(name), &mut buffer[..])) {
        let mut names: Vec<String> =
            buffer[..size].split(|byte| *byte == 0).map(|name| name.escape_ascii().to_string()).collect();
        names.sort();
        log.say(names.join(" "));
    }
}

fn xattrs(log: &mut Log) {
    log.file("file", b"");
    log.mkdir("d");
    rustix::fs::symlink("file", log.at("s")).expect("symlink");
    let none = XattrFlags::empty();
    for name in ["file", "d", "s"] {
        get(log, name, "user.none", 100);
        list(log, name);
        set(log, name, "user.one", b"first", none);
        set(log, name, "user.one", b"again", XattrFlags::CREATE);
        set(log, name, "user.two", b"second", XattrFlags::REPLACE);
        set(log, name, "user.two", b"second", XattrFlags::CREATE);
        set(log, name, "user.one", b"replaced \0 \xff", XattrFlags::REPLACE);
        set(log, name, "user.empty", b"", none);
        for room in [0, 3, 12, 100] {
            get(log, name, "user.one", room);
        }
        get(log, name, "user.empty", 10);
        list(log, name);
        let answer = rustix::fs::lremovexattr(log.at(name), "user.one");
        log.did("removexattr", answer);
        let answer = rustix::fs::lremovexattr(log.at(name), "user.one");
        log.did("removexattr again", answer);
        list(log, name);
    }
    let mark = log.mark("file");
    set(log, "file", "user.time", b"x", none);
    log.moved("setxattr", "file", mark);
    set(log, "missing", "user.one", b"x", none);
    set(log, "file", "user.large", &[b'x'; 2_000], none);
    get(log, "file", "user.large", 4_000);
    set(log, "file", "user.huge", &[b'x'; 65_536], none);
    set(log, "file", "user.larger", &[b'x'; 65_537], none);
    set(log, "file", &format!("user.{}", "k".repeat(250)), b"x", none);
    set(log, "file", &format!("user.{}", "k".repeat(251)), b"x", none);
    set(log, "file", "user.", b"x", none);
}

fn namespaces(log: &mut Log) {
    log.file("file", b"");
    let none = XattrFlags::empty();
    for key in [
        "trusted.one",
        "security.one",
        "system.one",
        "nonsense.one",
        "nonsense",
        "system.posix_acl_access",
        "trusted.",
        "security.",
        "user.",
    ] {
        set(log, "file", key, b"value", none);
        get(log, "file", key, 100);
    }
    list(log, "file");
}
