//! Identity of a process: properties that two processes must share so that one can serve mounts for the other.
//!
//! Read by the command about itself, and by the serving process about the command (which the kernel identifies).
//! Everything comes from `/proc`.

use std::{
    fmt::Write,
    fs,
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::unix::fs::MetadataExt,
    path::Path,
};

/// Lines of `/proc/PID/status` that are part of the identity (proc(5)).
const FIELDS: [&str; 11] = [
    "Umask:",
    "Uid:",
    "Gid:",
    "Groups:",
    "CapInh:",
    "CapPrm:",
    "CapEff:",
    "CapBnd:",
    "CapAmb:",
    "NoNewPrivs:",
    "Seccomp:",
];

/// Namespaces that are part of the identity: users, mounts, processes.
const NAMESPACES: [&str; 3] = ["user", "mnt", "pid"];

/// Returns the identity of this process.
///
/// # Errors
/// `/proc` is not mounted.
pub fn own() -> io::Result<String> {
    of(Path::new("/proc/self"))
}

/// Returns the identity of another process.
///
/// # Errors
/// It is gone, or this process may not read it.
pub fn of_process(pid: i32) -> io::Result<String> {
    of(&Path::new("/proc").join(pid.to_string()))
}

fn of(process: &Path) -> io::Result<String> {
    let mut text = counted(&fs::read_to_string(process.join("status"))?);
    for namespace in NAMESPACES {
        text.push_str(&fs::read_link(process.join("ns").join(namespace))?.to_string_lossy());
        text.push('\n');
    }
    for (what, link) in [("root", "root"), ("program", "exe")] {
        let there = fs::metadata(process.join(link))?;
        // Writing to a string cannot fail.
        let _ = writeln!(text, "{what} {} {}", there.dev(), there.ino());
    }
    // Without a security module there is no label.
    text.push_str(&fs::read_to_string(process.join("attr/current")).unwrap_or_default());
    Ok(text)
}

/// Returns the lines that are part of the identity. Pure.
fn counted(status: &str) -> String {
    let counts = |line: &&str| FIELDS.iter().any(|field| line.starts_with(field));
    status.lines().filter(counts).flat_map(|line| [line, "\n"]).collect()
}

/// Returns a hash of an identity, the same in every process of this program.
pub fn digest(identity: &str) -> u64 {
    let mut hasher = DefaultHasher::new();
    identity.hash(&mut hasher);
    hasher.finish()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::process::{Command, Stdio};

    #[test]
    fn lines_that_say_what_a_process_may_do_count() {
        let status = "Name:\tnacre\nUmask:\t0022\nState:\tR\nUid:\t1\t1\t1\t1\nUidx:\nGroups:\t1 2 \nVmRSS:\t5 kB\nSeccomp:\t0\nSeccomp_filters:\t0\n";
        assert_eq!(counted(status), "Umask:\t0022\nUid:\t1\t1\t1\t1\nGroups:\t1 2 \nSeccomp:\t0\n");
    }

    #[test]
    fn processes_are_alike_until_they_differ() {
        let own = own().unwrap();
        assert_eq!(of_process(std::process::id().cast_signed()).unwrap(), own);
        assert_eq!(digest(&own), digest(&own.clone()));
        for field in FIELDS {
            assert!(own.lines().any(|line| line.starts_with(field)), "{field}");
        }
        // Another umask, another program.
        let mut other = Command::new("sh").args(["-c", "umask 0123; read line"]).stdin(Stdio::piped()).spawn().unwrap();
        let pid = other.id().cast_signed();
        while !fs::read_to_string(format!("/proc/{pid}/status")).unwrap().contains("0123") {
            std::thread::yield_now();
        }
        let theirs = of_process(pid).unwrap();
        drop(other.stdin.take());
        other.wait().unwrap();
        assert_ne!(digest(&theirs), digest(&own));
        assert!(of_process(pid).is_err());
    }
}
