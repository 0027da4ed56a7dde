//! Exports by the kernel's NFS server, through exportfs(8).

use crate::cage::programs::{Program, run};
use nacre_pool::properties::sharing::{NfsShare, Squash};
use std::{fs, path::Path};

const EXPORTFS: Program = Program { name: "exportfs", package: "nfs-kernel-server" };

/// Whether the server and exportfs(8) are available.
pub(super) fn is_there() -> bool {
    let known =
        || fs::read_to_string("/proc/filesystems").is_ok_and(|all| all.lines().any(|line| line == "nodev\tnfsd"));
    (Path::new("/proc/fs/nfsd/threads").exists() || known())
        && ["/usr/sbin/exportfs", "/sbin/exportfs"].iter().any(|path| Path::new(path).exists())
}

/// Exports a mount to each of its clients.
pub(super) fn share(path: &str, guid: u64, wanted: &NfsShare) -> Result<(), String> {
    for (host, read_only) in &wanted.clients {
        let options = options(guid, wanted, *read_only);
        run(EXPORTFS, &["-o", &options, &format!("{host}:{path}")], 0).map_err(|failure| failure.what)?;
    }
    Ok(())
}

/// Returns the options of exports(5). The `fsid` is constant for a dataset, so file handles stay valid after every
/// mount; `mountpoint` keeps the directory below from being exported while nothing is mounted.
fn options(guid: u64, wanted: &NfsShare, read_only: bool) -> String {
    let mut words = vec![
        if read_only { "ro" } else { "rw" }.to_owned(),
        if wanted.asynchronous { "async" } else { "sync" }.to_owned(),
        if wanted.insecure { "insecure" } else { "secure" }.to_owned(),
        match wanted.squash {
            Squash::Root => "root_squash",
            Squash::None => "no_root_squash",
            Squash::All => "all_squash",
        }
        .to_owned(),
        "no_subtree_check".to_owned(),
        "mountpoint".to_owned(),
        format!("fsid={:08x}-{:04x}-{:04x}-6e61-637265000000", guid >> 32, (guid >> 16) & 0xffff, guid & 0xffff),
    ];
    words.extend(wanted.anonymous_user.map(|user| format!("anonuid={user}")));
    words.extend(wanted.anonymous_group.map(|group| format!("anongid={group}")));
    if !wanted.security.is_empty() {
        words.push(format!("sec={}", wanted.security.join(":")));
    }
    words.join(",")
}

/// Removes the export to a client; it may be gone already.
pub(super) fn take_back(host: &str, at: &Path) -> Result<(), String> {
    if !is_there() {
        return Ok(());
    }
    let export = format!("{host}:{}", at.display());
    match run(EXPORTFS, &["-u", &export], 0) {
        Err(failure) if !failure.what.contains("Could not find") => Err(failure.what),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_pool::properties::sharing::nfs;

    #[test]
    fn options_are_those_of_exports() {
        let wanted = |text: &str| nfs(text).unwrap().unwrap();
        assert_eq!(
            options(0x0123_4567_89ab_cdef, &wanted("on"), false),
            "rw,sync,secure,root_squash,no_subtree_check,mountpoint,fsid=01234567-89ab-cdef-6e61-637265000000"
        );
        assert_eq!(
            options(1, &wanted("ro=@10.0.0.0/8,all_squash,anonuid=99,anongid=98,sec=krb5:sys,insecure,async"), true),
            "ro,async,insecure,all_squash,no_subtree_check,mountpoint,fsid=00000000-0000-0001-6e61-637265000000,anonuid=99,anongid=98,sec=krb5:sys"
        );
    }
}
