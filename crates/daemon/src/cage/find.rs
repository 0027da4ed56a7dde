//! Finds existing cages: processes of ours that serve cages are asked over their control sockets, cages of the
//! kernel's engines are looked up in their records.
//!
//! Paths are compared as text and not accessed where that suffices: an access to a hanging mount would hang the
//! caller.

use super::{engine::Figures, record::CageRecord, report::CageReport};
use crate::{
    control::{self, FoundMounts, Peer},
    failure::{Exit, Failure},
    report::{path_text, printable},
    runtime::Whose,
};
use nacre_layers::size::Size;
use std::{
    fs,
    path::{Path, PathBuf},
};

/// Returns all cages of these users, by directory; prints which processes do not answer.
///
/// # Errors
/// Records of cages that cannot be read.
pub fn all(whose: &Whose) -> Result<Vec<CageReport>, Failure> {
    let found = control::find(whose);
    found.tell_silent();
    crate::report::tell_detached(
        found.peers.iter().map(|peer| {
            (&peer.report.mountpoint, peer.report.detached && !peer.report.cages.is_empty(), peer.report.pid)
        }),
    );
    of(found)
}

/// Returns our own cages without printing which processes do not answer: the user did not ask about them.
///
/// # Errors
/// As [`all`].
pub fn known() -> Result<Vec<CageReport>, Failure> {
    of(control::find(&Whose::Ours))
}

fn of(found: FoundMounts) -> Result<Vec<CageReport>, Failure> {
    let mut cages: Vec<CageReport> = found.peers.into_iter().flat_map(|peer| peer.report.cages).collect();
    cages.iter_mut().for_each(sanitise);
    cages.extend(of_kernel()?);
    cages.sort_by(|a, b| (&a.directory, &a.mountpoint).cmp(&(&b.directory, &b.mountpoint)));
    Ok(cages)
}

/// Returns the cages of the kernel's engines.
///
/// # Errors
/// Records that cannot be read.
pub fn of_kernel() -> Result<Vec<CageReport>, Failure> {
    CageRecord::all()?.iter().map(of_record).collect()
}

/// Reports on a cage of a kernel engine. A cage whose figures cannot be read is shown without them, and with the
/// reason.
fn of_record(record: &CageRecord) -> Result<CageReport, Failure> {
    let mut notes = Vec::new();
    let figures = match crate::cage::engines::engine_of(record)?.figures(record) {
        Ok(figures) => figures,
        Err(failure) => {
            notes.push(failure.what);
            Figures { limit: record.bytes, mode: "unknown".to_owned(), ..Figures::default() }
        }
    };
    notes.extend(figures.notes);
    notes.extend(figures.on_host.map(|bytes| format!("the image takes {} of the host", Size::new(bytes).short())));
    notes.extend(figures.fstab.map(|line| format!("after a reboot, by fstab: {line}")));
    Ok(CageReport {
        directory: path_text(&record.directory),
        mountpoint: path_text(&record.mountpoint),
        engine: record.engine.to_string(),
        mode: figures.mode,
        attached: figures.attached,
        when_full: "deny".to_owned(),
        limit: Some(figures.limit),
        used: figures.used,
        free: figures.free,
        inode_limit: figures.inode_limit,
        inodes: figures.inodes_used,
        accounting: "the kernel's".to_owned(),
        notes,
        ..CageReport::default()
    })
}

/// Returns the record of a cage of a kernel engine.
///
/// # Errors
/// Records that cannot be read.
pub fn record(directory: &Path) -> Result<Option<CageRecord>, Failure> {
    for path in paths(directory)? {
        if let Some(record) = CageRecord::find(&path)? {
            return Ok(Some(record));
        }
    }
    Ok(None)
}

/// Returns the cage of a directory, named by the directory or by its mount point.
///
/// # Errors
/// A directory that is no cage.
pub fn named<'a>(cages: &'a [CageReport], directory: &Path) -> Result<&'a CageReport, Failure> {
    let found = candidates(directory)?.into_iter().find_map(|text| {
        let by_place = cages.iter().find(|cage| cage.mountpoint == text);
        by_place.or_else(|| cages.iter().find(|cage| cage.directory == text))
    });
    found.ok_or_else(|| missing(directory))
}

/// Returns the process that serves the cage of a directory, and the cage's index in its report.
///
/// # Errors
/// A directory whose parent does not exist.
pub fn served(peers: Vec<Peer>, directory: &Path) -> Result<Option<(Peer, usize)>, Failure> {
    let texts = candidates(directory)?;
    let place = |field: fn(&CageReport) -> &str| {
        texts.iter().find_map(|text| {
            let of = |peer: &Peer| peer.report.cages.iter().position(|cage| field(cage) == text.as_str());
            peers.iter().enumerate().find_map(|(index, peer)| of(peer).map(|cage| (index, cage)))
        })
    };
    let found = place(|cage| &cage.mountpoint).or_else(|| place(|cage| &cage.directory));
    Ok(found.and_then(|(index, cage)| peers.into_iter().nth(index).map(|peer| (peer, cage))))
}

/// Makes the failure for a directory that is no cage.
pub fn missing(directory: &Path) -> Failure {
    Failure::new(format!("{} is no cage", path_text(directory)))
        .exit(Exit::NotFound)
        .next("`nacre cage list` lists them")
}

/// Paths that a directory may be recorded by: as the user names it, and with its link resolved.
fn paths(directory: &Path) -> Result<Vec<PathBuf>, Failure> {
    let lexical = control::lexical(directory)?;
    // Only a link is followed: its target may hang, but then it is what the user named.
    let real = match fs::read_link(&lexical) {
        Ok(_) => fs::canonicalize(&lexical).ok(),
        Err(_) => None,
    };
    Ok(std::iter::once(lexical).chain(real).collect())
}

/// The paths of [`paths`] as text.
fn candidates(directory: &Path) -> Result<Vec<String>, Failure> {
    Ok(paths(directory)?.iter().map(|path| path_text(path)).collect())
}

/// Removes control characters from the texts of a report: other users' daemons may send anything, and no escape
/// sequence may reach a terminal.
pub fn sanitise(cage: &mut CageReport) {
    let clean = |text: &mut String| {
        if text.chars().any(char::is_control) {
            *text = printable(text.as_bytes());
        }
    };
    let CageReport {
        directory,
        mountpoint,
        engine,
        engine_reason,
        mode,
        when_full,
        accounting,
        users,
        directories,
        collecting,
        notes,
        ..
    } = cage;
    for text in [directory, mountpoint, engine, engine_reason, mode, when_full, accounting] {
        clean(text);
    }
    users.iter_mut().for_each(|user| clean(&mut user.user));
    directories.iter_mut().for_each(|directory| clean(&mut directory.path));
    notes.iter_mut().for_each(clean);
    collecting.iter_mut().filter_map(|collecting| collecting.why_not.as_mut()).for_each(clean);
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cage(directory: &str, mountpoint: &str) -> CageReport {
        CageReport { directory: directory.to_owned(), mountpoint: mountpoint.to_owned(), ..CageReport::default() }
    }

    #[test]
    fn a_cage_is_named_by_its_place_or_its_directory() {
        let scratch = tempfile::tempdir().unwrap();
        let root = fs::canonicalize(scratch.path()).unwrap();
        for name in ["a", "b", "c"] {
            fs::create_dir(root.join(name)).unwrap();
        }
        std::os::unix::fs::symlink(root.join("a"), root.join("link")).unwrap();
        let at = |name: &str| path_text(&root.join(name));
        let cages = [cage(&at("a"), &at("b")), cage(&at("b"), &at("c"))];
        for (named_by, expected) in [("a", 0), ("b", 0), ("c", 1), ("link", 0), ("./a", 0)] {
            assert_eq!(named(&cages, &root.join(named_by)).unwrap(), &cages[expected], "{named_by}");
        }
        assert_eq!(named(&cages, &root.join("d")).unwrap_err().exit, Exit::NotFound);
        assert_eq!(named(&cages, &root).unwrap_err().exit, Exit::NotFound);
    }

    #[test]
    fn a_terminal_gets_no_commands_from_others() {
        let mut hostile = cage("\x1b]0;x\x07", "/m");
        hostile.notes.push("\x1b[2J".to_owned());
        sanitise(&mut hostile);
        assert_eq!(
            (hostile.directory.as_str(), hostile.notes.as_slice()),
            ("\\x1b]0;x\\x07", &["\\x1b[2J".to_owned()][..])
        );
    }
}
