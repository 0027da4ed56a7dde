//! Marks on branches that hide names of lower branches or redirect directories: whiteouts, opaque directories,
//! redirects.
//!
//! Called by look-ups, listings and every operation that removes or moves names. All forms are read; [`Style`]
//! chooses the form that is written:
//! * `wh`: an empty file `.wh.NAME` in the directory of the name, `.wh..wh..opq` in an opaque directory (aufs,
//!   OCI layers);
//! * `chardev`: a character device 0/0 in place of the name, `overlay.opaque` = `y` on the directory
//!   (overlayfs);
//! * `xattr`: an empty regular file with `overlay.whiteout`, in a directory whose `overlay.opaque` is `x`
//!   (overlayfs 6.7 and later, nested).
//!
//! A name whose `.wh.NAME` would be longer than names can be (over 251 bytes) is hidden by a
//! symbolic link `.wh..wh.h.DIGEST` that points to the name: a link is made with its content in one
//! step. Invariants:
//! * a character device 0/0 that a user made has an attribute that marks it as a device
//!   (`trusted.nacre.device`);
//! * a mark hides names of lower branches, never a file with the same name on its own branch (as OCI specifies,
//!   and as a crash between the two steps of a removal requires);
//! * redirects are valid only in the namespace that the union writes: the owner of a directory may set `user.*`
//!   on it, and must not be able to show other users' directories as his own.

mod digest;
#[cfg(test)]
mod tests;

use crate::{branch::ParseError, swap::Swap};
use digest::sha256;
use nacre_vfs::{
    Caller, DirEntry, DirSink, Entry, Errno, Kind, Layer, NAME_MAX, Name, Node, RenameFlags, Result, XattrFlags,
};
use std::{borrow::Cow, fmt, fmt::Write as _, ops::Deref, str::FromStr};

/// Prefix of whiteouts; no user has names like this.
pub(crate) const PREFIX: &[u8] = b".wh.";

/// Name of the file that makes its directory opaque.
pub(crate) const OPAQUE: &[u8] = b".wh..wh..opq";

/// Prefix of whiteouts of long names.
pub(crate) const LONG: &[u8] = b".wh..wh.h.";

/// The attribute of a character device 0/0 that is a device and no whiteout. Making devices takes privilege, so
/// an attribute that takes privilege is enough.
const DEVICE: &[u8] = b"trusted.nacre.device";

/// The form in which whiteouts are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// `.wh.NAME` in the same directory: needs no privilege, and is the form of container layers.
    #[default]
    Wh,
    /// A character device 0/0 in place of the name: the form of the kernel's overlay file system.
    Chardev,
    /// A file with an extended attribute: the overlay file system's form where devices cannot be made.
    Xattr,
}

impl FromStr for Style {
    type Err = ParseError;

    fn from_str(text: &str) -> std::result::Result<Style, ParseError> {
        match text {
            "wh" => Ok(Style::Wh),
            "chardev" => Ok(Style::Chardev),
            "xattr" => Ok(Style::Xattr),
            _ => Err(ParseError::new(format!(
                "\"{}\" is no form of whiteout; there are wh, chardev and xattr",
                text.escape_debug()
            ))),
        }
    }
}

impl fmt::Display for Style {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Style::Wh => "wh",
            Style::Chardev => "chardev",
            Style::Xattr => "xattr",
        })
    }
}

/// The namespace of the extended attributes of marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Namespace {
    /// `trusted.*`, which takes privilege to set.
    Trusted,
    /// `user.*`.
    User,
}

impl Namespace {
    /// The attribute with the redirect of a directory.
    pub(crate) fn redirect(self) -> &'static [u8] {
        match self {
            Namespace::Trusted => b"trusted.overlay.redirect",
            Namespace::User => b"user.overlay.redirect",
        }
    }

    /// The attribute of a directory that has copies.
    pub(crate) fn impure(self) -> &'static [u8] {
        match self {
            Namespace::Trusted => b"trusted.nacre.impure",
            Namespace::User => b"user.nacre.impure",
        }
    }

    /// The attribute `suffix` (`overlay.opaque`) in this namespace.
    fn attribute(self, suffix: &str) -> String {
        match self {
            Namespace::Trusted => format!("trusted.{suffix}"),
            Namespace::User => format!("user.{suffix}"),
        }
    }
}

/// The result of a look-up on one branch.
#[derive(Debug)]
pub(crate) enum Seen {
    /// No entry: branches below count.
    Absent,
    /// A whiteout: there is no file, and branches below do not count.
    WhitedOut,
    /// A file.
    Found(Entry),
}

/// The marks of a directory that concern the branches below.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Opacity {
    /// Opaque: no directory below is merged.
    pub opaque: bool,
    /// Whether empty files in it may be whiteouts.
    pub x: bool,
    /// Whether it has copies, which store the inode numbers of their origins.
    pub impure: bool,
    /// Its name on the branches below: a name in the same parent, or an absolute path from the branch's root.
    pub redirect: Option<Vec<u8>>,
}

/// The format of marks that is written, and the namespace whose redirects are valid.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Marks {
    /// The form of new whiteouts.
    pub style: Style,
    /// The namespace of new attributes, and the only one whose redirects are valid.
    pub namespace: Namespace,
}

/// Whether a name is reserved for the union and hidden from users.
pub(crate) fn is_reserved(name: &[u8]) -> bool {
    name.starts_with(PREFIX)
}

/// Whether an extended attribute is internal to the union: hidden from users, never copied.
pub(crate) fn is_private_xattr(name: &[u8]) -> bool {
    [&b"trusted.overlay."[..], b"user.overlay.", b"trusted.nacre.", b"user.nacre.", b"user.fuseoverlayfs."]
        .iter()
        .any(|prefix| name.starts_with(prefix))
        && !NESTED.iter().any(|(_, nested)| name.starts_with(nested))
}

/// Prefixes of the attributes of an overlay file system whose upper directory is in the union, and the prefixes
/// under which they are stored, as the kernel's overlay file system stores those of one within another: the
/// union ignores them, and copies them like any other.
const NESTED: [(&[u8], &[u8]); 2] =
    [(b"trusted.overlay.", b"trusted.overlay.overlay."), (b"user.overlay.", b"user.overlay.overlay.")];

/// The stored name of an extended attribute that users access; `None` for a reserved one.
pub(crate) fn stored_xattr(name: &[u8]) -> Option<Cow<'_, [u8]>> {
    for (prefix, nested) in NESTED {
        if let Some(rest) = name.strip_prefix(prefix) {
            return Some([nested, rest].concat().into());
        }
    }
    (!is_private_xattr(name)).then_some(Cow::Borrowed(name))
}

/// The visible name of a stored extended attribute; `None` for a reserved one.
pub(crate) fn shown_xattr(name: &[u8]) -> Option<Cow<'_, [u8]>> {
    for (prefix, nested) in NESTED {
        if let Some(rest) = name.strip_prefix(nested) {
            return Some([prefix, rest].concat().into());
        }
    }
    (!is_private_xattr(name)).then_some(Cow::Borrowed(name))
}

/// The kind of mark that a listed name has, as far as the name alone shows.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameMark<'a> {
    /// A file, unless its type and its attributes make it a whiteout.
    Plain,
    /// The whiteout of this name.
    Hides(Name<'a>),
    /// The whiteout of a name that is too long; the link's target is the name.
    HidesLong,
    /// A reserved name of the union.
    Private,
}

/// Parses the name of a listed entry.
pub(crate) fn listed(name: Name<'_>) -> NameMark<'_> {
    let Some(hidden) = name.bytes().strip_prefix(PREFIX) else { return NameMark::Plain };
    if name.bytes().starts_with(LONG) {
        NameMark::HidesLong
    } else if is_reserved(hidden) {
        NameMark::Private
    } else {
        // Whiteouts of an empty name, `.` and `..` hide nothing.
        Name::new(hidden).map_or(NameMark::Private, NameMark::Hides)
    }
}

/// Whether a listed entry of this type can be a whiteout in place of the name, so that its attributes have to
/// be read.
pub(crate) fn may_be_whiteout(kind: Option<Kind>, x_directory: bool) -> bool {
    match kind {
        None | Some(Kind::Character) => true,
        Some(Kind::File) => x_directory,
        Some(_) => false,
    }
}

/// Whether a file is a device number 0/0, which is a whiteout unless it has [`DEVICE`].
pub(crate) fn is_whiteout_device(kind: Kind, device: (u32, u32)) -> bool {
    kind == Kind::Character && device == (0, 0)
}

/// The name of the whiteout of a name.
fn mark_name(name: Name<'_>) -> Cow<'static, [u8]> {
    if name.bytes().len() + PREFIX.len() <= NAME_MAX {
        return [PREFIX, name.bytes()].concat().into();
    }
    let mut digest = String::with_capacity(64);
    for byte in sha256(name.bytes()) {
        // Writing to a string cannot fail.
        let _ = write!(digest, "{byte:02x}");
    }
    [LONG, digest.as_bytes()].concat().into()
}

/// Reads the name that the whiteout of a long name hides; `None` where the link was not made by a union.
pub(crate) fn long_name(layer: &dyn Layer, directory: &Node, mark: Name<'_>) -> Result<Option<Vec<u8>>> {
    let target = match layer.lookup(&Caller::ROOT, directory, mark) {
        Ok(entry) if entry.attr.kind == Kind::Symlink => layer.readlink(&Caller::ROOT, &entry.node),
        Ok(_) => return Ok(None),
        Err(error) => Err(error),
    };
    match target {
        Ok(target) => Ok(Name::new(&target).is_ok_and(|name| *mark_name(name) == *mark.bytes()).then_some(target)),
        Err(Errno::ENOENT) => Ok(None),
        Err(error) => Err(error),
    }
}

/// Whether an error means that a file lacks this attribute, or cannot have any.
fn lacks_attribute(error: Errno) -> bool {
    matches!(error, Errno::ENODATA | Errno::EOPNOTSUPP | Errno::ENOSYS)
}

/// Reads the names of a file's extended attributes, NUL after each.
fn attributes(layer: &dyn Layer, node: &Node) -> Result<Vec<u8>> {
    let mut names = vec![0; 1024];
    loop {
        match layer.listxattr(&Caller::ROOT, node, &mut names) {
            Ok(length) => {
                names.truncate(length);
                return Ok(names);
            }
            // XATTR_LIST_MAX of limits.h bounds this.
            Err(Errno::ERANGE) if names.len() < 1 << 17 => names.resize(names.len() * 4, 0),
            Err(error) if lacks_attribute(error) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        }
    }
}

/// Reads an extended attribute; `None` where there is none.
fn attribute(layer: &dyn Layer, node: &Node, name: &[u8]) -> Result<Option<Vec<u8>>> {
    let mut value = vec![0; 256];
    loop {
        match layer.getxattr(&Caller::ROOT, node, name, &mut value) {
            Ok(length) => {
                value.truncate(length);
                return Ok(Some(value));
            }
            // XATTR_SIZE_MAX of limits.h bounds this.
            Err(Errno::ERANGE) if value.len() < 1 << 16 => value.resize(value.len() * 16, 0),
            Err(error) if lacks_attribute(error) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}

impl Marks {
    /// Finds out in which namespace the process may set attributes on a writable branch, by setting one on the
    /// branch's root and removing it.
    ///
    /// # Errors
    /// Errors of the storage that do not concern the namespace.
    pub(crate) fn probe(layer: &dyn Layer, root: &Node) -> Result<Namespace> {
        const PROBE: &[u8] = b"trusted.nacre.probe";
        match layer.setxattr(&Caller::ROOT, root, PROBE, b"1", XattrFlags::default()) {
            Ok(()) => {
                layer.removexattr(&Caller::ROOT, root, PROBE)?;
                Ok(Namespace::Trusted)
            }
            Err(Errno::EPERM | Errno::EACCES) => Ok(Namespace::User),
            // No attributes at all, or not now: marks without attributes work, and the namespace of existing
            // ones is assumed to be `trusted`.
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::ENOSPC | Errno::EDQUOT | Errno::EROFS) => {
                Ok(Namespace::Trusted)
            }
            Err(error) => Err(error),
        }
    }

    /// Looks a name up on one branch, including its `.wh.` whiteout. Without `reads_marks` nothing counts as a
    /// whiteout, and none is searched.
    ///
    /// # Errors
    /// As [`Marks::look_at`].
    pub(crate) fn look(
        &self,
        layer: &dyn Layer,
        caller: &Caller,
        directory: &Node,
        name: Name<'_>,
        reads_marks: bool,
        x_directory: bool,
    ) -> Result<Seen> {
        match self.look_at(layer, caller, directory, name, reads_marks, x_directory)? {
            Seen::Absent if reads_marks && stands_beside(layer, directory, name)? => Ok(Seen::WhitedOut),
            seen => Ok(seen),
        }
    }

    /// Looks up the entry of the very name on one branch, without its `.wh.` whiteout (see [`stands_beside`]).
    /// Without `reads_marks` nothing counts as a whiteout.
    ///
    /// # Errors
    /// Errors of the storage. A name that is too long for this branch is absent from it.
    pub(crate) fn look_at(
        &self,
        layer: &dyn Layer,
        caller: &Caller,
        directory: &Node,
        name: Name<'_>,
        reads_marks: bool,
        x_directory: bool,
    ) -> Result<Seen> {
        match layer.lookup(caller, directory, name) {
            Ok(entry) if reads_marks && self.is_whiteout(layer, &entry, x_directory)? => Ok(Seen::WhitedOut),
            Ok(entry) => Ok(Seen::Found(entry)),
            Err(Errno::ENOENT | Errno::ENAMETOOLONG) => Ok(Seen::Absent),
            Err(error) => Err(error),
        }
    }

    /// Whether a file is a whiteout of its own name.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn is_whiteout(&self, layer: &dyn Layer, entry: &Entry, x_directory: bool) -> Result<bool> {
        let attr = &entry.attr;
        match attr.kind {
            Kind::Character if is_whiteout_device(attr.kind, (attr.rdev_major, attr.rdev_minor)) => {
                Ok(attribute(layer, &entry.node, DEVICE)?.is_none())
            }
            Kind::File if x_directory && attr.size == 0 => {
                for namespace in [Namespace::Trusted, Namespace::User] {
                    let name = namespace.attribute("overlay.whiteout");
                    if attribute(layer, &entry.node, name.as_bytes())?.is_some() {
                        return Ok(true);
                    }
                }
                Ok(false)
            }
            _ => Ok(false),
        }
    }

    /// Marks a device 0/0 that a user makes as no whiteout. It must not have a visible name before.
    ///
    /// # Errors
    /// EPERM where the attribute cannot be set.
    pub(crate) fn keep_device(&self, layer: &dyn Layer, node: &Node) -> Result<()> {
        match layer.setxattr(&Caller::ROOT, node, DEVICE, b"y", XattrFlags::default()) {
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => Err(Errno::EPERM),
            other => other,
        }
    }

    /// Reads the marks of a directory that concern the branches below: two calls if there are none.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn opacity(&self, layer: &dyn Layer, directory: &Node) -> Result<Opacity> {
        let mut opacity = Opacity::default();
        match layer.lookup(&Caller::ROOT, directory, Name::new(OPAQUE)?) {
            Ok(_) => opacity.opaque = true,
            Err(Errno::ENOENT) => {}
            Err(error) => return Err(error),
        }
        for name in attributes(layer, directory)?.split(|byte| *byte == 0) {
            match name {
                b"trusted.overlay.opaque" | b"user.overlay.opaque" | b"user.fuseoverlayfs.opaque" => {
                    match attribute(layer, directory, name)?.as_deref() {
                        Some(b"y") => opacity.opaque = true,
                        Some(b"x") => opacity.x = true,
                        _ => {}
                    }
                }
                b"trusted.nacre.impure" | b"user.nacre.impure" => opacity.impure = true,
                _ if name == self.namespace.redirect() => opacity.redirect = attribute(layer, directory, name)?,
                _ => {}
            }
        }
        Ok(opacity)
    }

    /// Makes a directory opaque without creating a file in it; returns whether the storage supports that.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn make_opaque_by_attribute(&self, layer: &dyn Layer, directory: &Node) -> Result<bool> {
        let name = self.namespace.attribute("overlay.opaque");
        match layer.setxattr(&Caller::ROOT, directory, name.as_bytes(), b"y", XattrFlags::default()) {
            Ok(()) => Ok(true),
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EPERM) => Ok(false),
            Err(error) => Err(error),
        }
    }

    /// Makes a directory opaque.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn make_opaque(&self, layer: &dyn Layer, directory: &Node) -> Result<()> {
        let opaque = Name::new(OPAQUE)?;
        if self.style == Style::Wh {
            return stand(layer, directory, opaque);
        }
        let name = self.namespace.attribute("overlay.opaque");
        // The attribute has only one of two values. If it states that there are whiteouts among the files,
        // these must not become visible.
        let x = attribute(layer, directory, name.as_bytes())?.as_deref() == Some(b"x");
        let set = || layer.setxattr(&Caller::ROOT, directory, name.as_bytes(), b"y", XattrFlags::default());
        if x {
            stand(layer, directory, opaque)?;
        } else {
            match set() {
                Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => return stand(layer, directory, opaque),
                other => other?,
            }
        }
        // From here on it is opaque. Other programs list opaque directories as they are: whiteouts that no
        // longer hide anything would show.
        let tidied = self.clear_whiteouts(layer, directory, x).and_then(|()| match x {
            true => set().and_then(|()| layer.unlink(&Caller::ROOT, directory, opaque)),
            false => Ok(()),
        });
        if let Err(error) = tidied {
            tracing::warn!(?error, "whiteouts stay in an opaque directory: other programs may list them");
        }
        Ok(())
    }

    /// Removes a directory's opacity.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn make_transparent(&self, layer: &dyn Layer, directory: &Node) -> Result<()> {
        for name in attributes(layer, directory)?.split(|byte| *byte == 0) {
            let says =
                matches!(name, b"trusted.overlay.opaque" | b"user.overlay.opaque" | b"user.fuseoverlayfs.opaque");
            if says && attribute(layer, directory, name)?.as_deref() == Some(b"y") {
                layer.removexattr(&Caller::ROOT, directory, name)?;
            }
        }
        match layer.unlink(&Caller::ROOT, directory, Name::new(OPAQUE)?) {
            Err(Errno::ENOENT) => Ok(()),
            other => other,
        }
    }

    /// Removes whiteouts in place of names.
    fn clear_whiteouts(&self, layer: &dyn Layer, directory: &Node, x: bool) -> Result<()> {
        let caller = &Caller::ROOT;
        let mut candidates = Candidates { x, taken: Vec::new(), reached: 0 };
        loop {
            candidates.taken.clear();
            layer.readdir(caller, directory, candidates.reached, false, &mut candidates)?;
            if candidates.taken.is_empty() {
                return Ok(());
            }
            for name in &candidates.taken {
                let name = Name::new(name)?;
                if self.is_whiteout(layer, &layer.lookup(caller, directory, name)?, x)? {
                    layer.unlink(caller, directory, name)?;
                }
            }
        }
    }

    /// Hides a name from this branch down. Returns true where the whiteout has taken the very name: the file
    /// there was replaced in one step, and a directory there is now in the work directory under the name
    /// `temp`. Returns false where a `.wh.` whiteout was made, and the caller then removes the file. `work`
    /// gives a directory of the same branch where one is needed; `temp` must be free in it.
    ///
    /// # Errors
    /// Errors of the storage; nothing has changed then except perhaps a file named `temp`.
    pub(crate) fn hide<W: Deref<Target = Node>>(
        &self,
        layer: &dyn Layer,
        work: &dyn Fn() -> Result<W>,
        temp: Name<'_>,
        directory: &Node,
        name: Name<'_>,
    ) -> Result<bool> {
        let caller = &Caller::ROOT;
        match self.style {
            Style::Wh => {}
            Style::Chardev => {
                let work = work()?;
                match layer.mknod(caller, &work, temp, Kind::Character, 0, (0, 0)) {
                    Ok(_) => return put(layer, &work, temp, directory, name),
                    // Without the privilege to make devices the other form has the same effect.
                    Err(Errno::EPERM | Errno::EOPNOTSUPP) => {}
                    Err(error) => return Err(error),
                }
            }
            Style::Xattr => return self.hide_by_attribute(layer, &*work()?, temp, directory, name),
        }
        let mark = mark_name(name);
        let mark = Name::new(&mark)?;
        if mark.bytes().starts_with(LONG) {
            match layer.symlink(caller, directory, mark, name.bytes()) {
                Ok(_) | Err(Errno::EEXIST) => {}
                Err(error) => return Err(error),
            }
        } else {
            stand(layer, directory, mark)?;
        }
        Ok(false)
    }

    fn hide_by_attribute(
        &self,
        layer: &dyn Layer,
        work: &Node,
        temp: Name<'_>,
        directory: &Node,
        name: Name<'_>,
    ) -> Result<bool> {
        let caller = &Caller::ROOT;
        let opaque = self.namespace.attribute("overlay.opaque");
        match attribute(layer, directory, opaque.as_bytes())?.as_deref() {
            // An opaque directory needs no whiteouts.
            Some(b"y") => return Ok(false),
            Some(b"x") => {}
            // First, so that the whiteout never shows as an empty file.
            _ => layer.setxattr(caller, directory, opaque.as_bytes(), b"x", XattrFlags::default())?,
        }
        let made = layer.mknod(caller, work, temp, Kind::File, 0o444, (0, 0))?;
        let whiteout = self.namespace.attribute("overlay.whiteout");
        if let Err(error) = layer.setxattr(caller, &made.node, whiteout.as_bytes(), b"y", XattrFlags::default()) {
            layer.unlink(caller, work, temp)?;
            return Err(error);
        }
        put(layer, work, temp, directory, name)
    }

    /// Removes the `.wh.` whiteout of a name, if there is one.
    ///
    /// # Errors
    /// Errors of the storage.
    pub(crate) fn unhide(&self, layer: &dyn Layer, directory: &Node, name: Name<'_>) -> Result<()> {
        match layer.unlink(&Caller::ROOT, directory, Name::new(&mark_name(name))?) {
            Err(Errno::ENOENT) => Ok(()),
            other => other,
        }
    }
}

/// A batch of names that may be whiteouts, and the position after the last one read.
struct Candidates {
    x: bool,
    taken: Vec<Vec<u8>>,
    reached: u64,
}

impl DirSink for Candidates {
    fn push(&mut self, entry: DirEntry<'_>) -> bool {
        const MOST: usize = 256;
        if self.taken.len() == MOST {
            return false;
        }
        if may_be_whiteout(entry.kind, self.x) {
            self.taken.push(entry.name.bytes().to_vec());
        }
        self.reached = entry.next;
        true
    }
}

/// Whether the `.wh.` whiteout of a name is in a directory, whether or not the name itself is there.
///
/// # Errors
/// Errors of the storage.
pub(crate) fn stands_beside(layer: &dyn Layer, directory: &Node, name: Name<'_>) -> Result<bool> {
    match layer.lookup(&Caller::ROOT, directory, Name::new(&mark_name(name))?) {
        Ok(_) => Ok(true),
        Err(Errno::ENOENT | Errno::ENAMETOOLONG) => Ok(false),
        Err(error) => Err(error),
    }
}

fn stand(layer: &dyn Layer, directory: &Node, name: Name<'_>) -> Result<()> {
    match layer.mknod(&Caller::ROOT, directory, name, Kind::File, 0o444, (0, 0)) {
        Ok(_) | Err(Errno::EEXIST) => Ok(()),
        Err(error) => Err(error),
    }
}

/// Moves a whiteout that was made in `work` to a name, in one step.
fn put(layer: &dyn Layer, work: &Node, temp: Name<'_>, directory: &Node, name: Name<'_>) -> Result<bool> {
    let caller = &Caller::ROOT;
    let moved = match layer.rename(caller, work, temp, directory, name, RenameFlags::default()) {
        Err(Errno::EISDIR | Errno::ENOTEMPTY | Errno::EEXIST) => {
            // The work directory is emptied at each start.
            let aside = [temp.bytes(), b".aside"].concat();
            let aside = Name::new(&aside)?;
            Swap { layer, caller, from: work, from_name: temp, to: directory, to_name: name, work, aside }.run()
        }
        other => other,
    };
    if let Err(error) = moved {
        // A file that cannot be removed now is removed with the whole directory at the next start.
        let _ = layer.unlink(caller, work, temp);
        return Err(error);
    }
    Ok(true)
}
