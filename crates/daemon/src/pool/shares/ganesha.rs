//! Exports by NFS-Ganesha, through a file that its configuration includes: `ganesha.conf` in the directory for
//! state that survives a reboot. It is assembled from one file for each export, in a directory next to it.
//!
//! Invariant: an export has the same id as long as it is shared, and usually forever: clients' file handles begin
//! with it.

use super::{
    device_number::{self, Reserved},
    lock::DirectoryLock,
};
use crate::{cage, failure::Failure, whole_file};
use nacre_admin::mounts::Sharing;
use nacre_pool::properties::sharing::{self, NfsShare, Squash};
use rustix::{
    fd::OwnedFd,
    process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal},
};
use std::{
    fmt::Write,
    fs, io,
    os::unix::fs::{DirBuilderExt, OpenOptionsExt},
    path::{Path, PathBuf},
};

/// PID files of the server.
const PID_FILES: [&str; 3] = ["/run/ganesha/ganesha.pid", "/run/ganesha.pid", "/var/run/ganesha.pid"];
/// The server's configuration.
const CONFIGURATION: &str = "/etc/ganesha/ganesha.conf";
/// Highest export id; the lowest is 1.
const EXPORTS: u64 = 65_534;

/// Whether NFS-Ganesha is installed.
pub(super) fn is_there() -> bool {
    Path::new("/usr/bin/ganesha.nfsd").exists()
}

/// Exports a mount.
pub(super) fn share(path: &str, guid: u64, wanted: &NfsShare) -> Result<(), String> {
    change(|directory| {
        let number = number_for(directory, guid);
        let text = export(path, guid, number, wanted);
        let file = directory.join(format!("{number}.conf"));
        let options = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).clone();
        whole_file::replace(&file, &file.with_extension("new"), &options, text.as_bytes())
    })
}

/// Removes the export of a mount.
pub(super) fn take_back(guid: u64) -> Result<(), String> {
    change(|directory| {
        let mut ours = files(directory).into_iter().filter(|(_, text)| text.starts_with(&mark(guid)));
        ours.try_for_each(|(file, _)| fs::remove_file(file))
    })
}

fn mark(guid: u64) -> String {
    format!("# {guid:016x}\n")
}

/// Returns the files of exports with their content.
fn files(directory: &Path) -> Vec<(PathBuf, String)> {
    let mut paths = crate::runtime::children(directory);
    paths.retain(|path| path.extension().is_some_and(|last| last == "conf"));
    paths.sort();
    paths.into_iter().filter_map(|path| Some((path.clone(), fs::read_to_string(&path).ok()?))).collect()
}

/// Returns the id of the export: derived from the dataset's GUID, unless another export has it.
fn number_for(directory: &Path, guid: u64) -> u64 {
    let mut number = guid % EXPORTS + 1;
    while fs::read_to_string(directory.join(format!("{number}.conf"))).is_ok_and(|text| !text.starts_with(&mark(guid)))
    {
        number = number % EXPORTS + 1;
    }
    number
}

/// Changes the files of exports, assembles them, and has the server reload, unless its configuration is unchanged:
/// clients may get errors during a reload. A mark file next to the configuration records that the server has
/// reloaded; it is removed before any change.
fn change(change: impl FnOnce(&Path) -> io::Result<()>) -> Result<(), String> {
    let Some(base) = cage::state::base() else { return Err("there is no place for files".to_owned()) };
    let whole = base.join("ganesha.conf");
    let told = whole.with_extension("told");
    let changed = || {
        let (directory, _lock) = directory(&base)?;
        change(&directory)?;
        let all: String = files(&directory).into_iter().map(|(_, text)| text).collect();
        let options = fs::OpenOptions::new().write(true).create(true).truncate(true).mode(0o644).clone();
        let head = "# Written by nacre: what is shared by sharenfs. Changes are lost.\n";
        let text = format!("{head}{all}");
        if told.exists() && fs::read(&whole).is_ok_and(|before| before == text.as_bytes()) {
            return Ok(());
        }
        match fs::remove_file(&told) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => return Err(error),
            _ => whole_file::replace(&whole, &whole.with_extension("new"), &options, text.as_bytes())?,
        }
        // Without the mark, the server reloads once more.
        if reload()
            && let Err(error) = fs::write(&told, "")
        {
            tracing::debug!(%error, "nothing says that NFS-Ganesha was told");
        }
        Ok(())
    };
    changed().map_err(|error| Failure::io("cannot write", whole.display(), &error).what)
}

/// Returns the directory of the files of exports, locked: each pool has a process of its own.
fn directory(base: &Path) -> io::Result<(PathBuf, fs::File)> {
    let directory = base.join("ganesha");
    fs::DirBuilder::new().recursive(true).mode(0o755).create(&directory)?;
    static EXPORTS: DirectoryLock = DirectoryLock::new();
    let lock = EXPORTS.take(&directory)?;
    Ok((directory, lock))
}

/// Reserves the constant device number for a dataset that this server exports, or may export later. `None` where
/// the server is not in use.
pub(super) fn reserve_number(sharing: &Sharing) -> Option<Reserved> {
    let base = cage::state::base()?;
    let shared = || matches!(sharing::nfs(&sharing.nfs), Ok(Some(_)));
    // Datasets in its configuration can be exported later without a new mount.
    let whole = base.join("ganesha.conf");
    let names_it = |text: String| whole.to_str().is_some_and(|whole| text.contains(whole));
    let included = || fs::read_to_string(CONFIGURATION).is_ok_and(names_it);
    if !is_there() || !(shared() || included()) {
        return None;
    }
    let reserved =
        directory(&base).and_then(|(_, lock)| device_number::reserve(sharing.guid, lock, running().is_some()));
    reserved
        .inspect_err(
            |error| tracing::warn!(%error, "clients of NFS may have to mount again: no number can be reserved"),
        )
        .ok()
}

/// Returns a pidfd of the server, where it runs.
fn running() -> Option<OwnedFd> {
    let number = PID_FILES.iter().find_map(|file| fs::read_to_string(file).ok()?.trim().parse::<i32>().ok());
    let number = Pid::from_raw(number?)?;
    let process = pidfd_open(number, PidfdFlags::empty()).ok()?;
    // The pidfd was opened before, so the name is of that process.
    let name = fs::read_to_string(format!("/proc/{}/comm", number.as_raw_nonzero()));
    name.is_ok_and(|name| name.trim_end() == "ganesha.nfsd").then_some(process)
}

/// Has the server reload its configuration, where it runs; returns whether it was signalled.
fn reload() -> bool {
    let sent = running().map(|process| pidfd_send_signal(process, Signal::HUP));
    if let Some(Err(error)) = sent {
        tracing::warn!(%error, "NFS-Ganesha could not be told of another export");
    }
    matches!(sent, Some(Ok(())))
}

/// Formats a block of ganesha-export-config(8).
fn export(path: &str, guid: u64, number: u64, wanted: &NfsShare) -> String {
    let mut text = mark(guid);
    let squash = match wanted.squash {
        Squash::Root => "Root_Squash",
        Squash::None => "No_Root_Squash",
        Squash::All => "All_Squash",
    };
    let security = if wanted.security.is_empty() { "sys".to_owned() } else { wanted.security.join(", ") };
    let mut say = |line: &str| {
        text.push_str(line);
        text.push('\n');
    };
    say("EXPORT {");
    say(&format!("  Export_Id = {number};"));
    say(&format!("  Path = \"{path}\";"));
    say(&format!("  Pseudo = \"{path}\";"));
    say(&format!("  Filesystem_Id = {}.{};", guid >> 32, guid & 0xffff_ffff));
    say("  Access_Type = None;");
    say(&format!("  Squash = {squash};"));
    say(&format!("  SecType = {security};"));
    say(&format!("  PrivilegedPort = {};", !wanted.insecure));
    let anonymous = [("Anonymous_Uid", wanted.anonymous_user), ("Anonymous_Gid", wanted.anonymous_group)];
    for (name, number) in anonymous {
        if let Some(number) = number {
            say(&format!("  {name} = {number};"));
        }
    }
    say("  FSAL { Name = VFS; }");
    for (host, read_only) in &wanted.clients {
        let host = host.replace(['[', ']'], "");
        let access = if *read_only { "RO" } else { "RW" };
        say(&format!("  CLIENT {{ Clients = {host}; Access_Type = {access}; }}"));
    }
    let _ = writeln!(text, "}}");
    text
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_pool::properties::sharing::nfs;

    #[test]
    fn an_export_is_one_block() {
        let wanted =
            nfs("rw=@10.0.0.0/8:[fd00::1],ro=*,no_root_squash,anonuid=5,sec=krb5:sys,insecure").unwrap().unwrap();
        let text = export("/srv/a b", (7 << 32) | 9, 10, &wanted);
        let expected =
            "# 0000000700000009\nEXPORT {\n  Export_Id = 10;\n  Path = \"/srv/a b\";\n  Pseudo = \"/srv/a b\";
  Filesystem_Id = 7.9;\n  Access_Type = None;\n  Squash = No_Root_Squash;\n  SecType = krb5, sys;
  PrivilegedPort = false;\n  Anonymous_Uid = 5;\n  FSAL { Name = VFS; }
  CLIENT { Clients = 10.0.0.0/8; Access_Type = RW; }\n  CLIENT { Clients = fd00::1; Access_Type = RW; }
  CLIENT { Clients = *; Access_Type = RO; }\n}\n";
        assert_eq!(text, expected);
    }

    #[test]
    fn two_exports_never_have_one_number() {
        let directory = tempfile::tempdir().unwrap();
        let first = number_for(directory.path(), 5);
        fs::write(directory.path().join(format!("{first}.conf")), mark(5)).unwrap();
        assert_eq!(number_for(directory.path(), 5), first);
        assert_eq!(number_for(directory.path(), 5 + EXPORTS), first + 1);
    }
}
