//! What is written on branches to say that something below is hidden: whiteouts, opaque
//! directories, redirects.
//!
//! Called by look-ups, listings and every operation that removes or moves names. Forms, all of them
//! read, one of them written by [`Style`]:
//! * `wh`: an empty file `.wh.NAME` beside the name, `.wh..wh..opq` in an opaque directory (aufs,
//!   OCI layers);
//! * `chardev`: a character device 0/0 in place of the name, `overlay.opaque` = `y` on the
//!   directory (overlayfs);
//! * `xattr`: an empty regular file with `overlay.whiteout`, in a directory whose `overlay.opaque`
//!   is `x` (overlayfs 6.7 and later, nested).
//!
//! A name whose `.wh.NAME` would be longer than names can be (over 251 bytes) is hidden by a
//! symbolic link `.wh..wh.h.DIGEST` that points to the name: a link is made with its content in one
//! step. Invariants:
//! * a character device 0/0 that a user made carries an attribute that says so
//!   (`trusted.nacre.device`);
//! * a mark hides what lies on lower branches, never a file beside it on its own branch (what OCI
//!   says, and what a crash between the two steps of a removal needs);
//! * redirects are believed only in the namespace that the union writes: whoever owns a directory
//!   may set `user.*` on it, and must not be able to show other people's directories as his own.

mod digest;
#[cfg(test)]
mod tests;

use crate::{branch::ParseError, swap::Swap};
use digest::sha256;
use nacre_vfs::{
    Caller, DirEntry, DirSink, Entry, Errno, Kind, Layer, NAME_MAX, Name, Node, RenameFlags, Result, XattrFlags,
};
use std::{borrow::Cow, fmt, fmt::Write as _, ops::Deref, str::FromStr};

/// What whiteouts begin with; no user has names like this.
pub(crate) const PREFIX: &[u8] = b".wh.";

/// The mark of an opaque directory.
pub(crate) const OPAQUE: &[u8] = b".wh..wh..opq";

/// What whiteouts of long names begin with.
pub(crate) const LONG: &[u8] = b".wh..wh.h.";

/// What says that a character device 0/0 is what it looks like, and no whiteout. Only the
/// privileged make devices, so nobody else needs it.
const DEVICE: &[u8] = b"trusted.nacre.device";

/// The form in which whiteouts are written.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Style {
    /// `.wh.NAME` beside the name: needs no privilege, and is what container layers carry.
    #[default]
    Wh,
    /// A character device 0/0 in place of the name: what the kernel's overlay file system reads.
    Chardev,
    /// A file with an extended attribute: what it reads where devices cannot be made.
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

/// Whose extended attributes carry the marks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Namespace {
    /// `trusted.*`, which takes privilege to set.
    Trusted,
    /// `user.*`.
    User,
}

impl Namespace {
    /// The attribute that tells where a directory goes on below.
    pub(crate) fn redirect(self) -> &'static [u8] {
        match self {
            Namespace::Trusted => b"trusted.overlay.redirect",
            Namespace::User => b"user.overlay.redirect",
        }
    }

    /// The attribute of a directory that holds copies.
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

/// What one branch answers for a name.
#[derive(Debug)]
pub(crate) enum Seen {
    /// Nothing: look below.
    Absent,
    /// It is hidden: there is nothing, and nothing below counts.
    WhitedOut,
    /// This file.
    Found(Entry),
}

/// What a directory of a branch says about the branches below.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Opacity {
    /// Nothing below is merged.
    pub opaque: bool,
    /// Empty files in it may be whiteouts.
    pub x: bool,
    /// Copies are in it, which carry the numbers of their origins.
    pub impure: bool,
    /// Where it goes on below: a name in the same parent, or an absolute path from the branch's
    /// top.
    pub redirect: Option<Vec<u8>>,
}

/// How marks are written and which are believed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Marks {
    /// The form of new whiteouts.
    pub style: Style,
    /// The namespace of new attributes, and the only one whose redirects count.
    pub namespace: Namespace,
}

/// Whether a name is kept from users.
pub(crate) fn is_reserved(name: &[u8]) -> bool {
    name.starts_with(PREFIX)
}

/// Whether an extended attribute is the union's own business: hidden from users, never copied.
pub(crate) fn is_private_xattr(name: &[u8]) -> bool {
    [&b"trusted.overlay."[..], b"user.overlay.", b"trusted.nacre.", b"user.nacre.", b"user.fuseoverlayfs."]
        .iter()
        .any(|prefix| name.starts_with(prefix))
        && !NESTED.iter().any(|(_, nested)| name.starts_with(nested))
}

/// Before the attributes of an overlay file system whose upper directory is in the union, as the kernel's own stores
/// those of one within another: they mean nothing to the union, and are copied like any other.
const NESTED: [(&[u8], &[u8]); 2] =
    [(b"trusted.overlay.", b"trusted.overlay.overlay."), (b"user.overlay.", b"user.overlay.overlay.")];

/// The name under which an extended attribute that users name is stored; `None` for one that is kept from them.
pub(crate) fn stored_xattr(name: &[u8]) -> Option<Cow<'_, [u8]>> {
    for (prefix, nested) in NESTED {
        if let Some(rest) = name.strip_prefix(prefix) {
            return Some([nested, rest].concat().into());
        }
    }
    (!is_private_xattr(name)).then_some(Cow::Borrowed(name))
}

/// The name by which users know a stored extended attribute; `None` for one that is kept from them.
pub(crate) fn shown_xattr(name: &[u8]) -> Option<Cow<'_, [u8]>> {
    for (prefix, nested) in NESTED {
        if let Some(rest) = name.strip_prefix(nested) {
            return Some([prefix, rest].concat().into());
        }
    }
    (!is_private_xattr(name)).then_some(Cow::Borrowed(name))
}

/// What a name in a listing says, as far as the name alone tells.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NameMark<'a> {
    /// A file, unless its type and its attributes say otherwise.
    Plain,
    /// The whiteout of this name.
    Hides(Name<'a>),
    /// The whiteout of a name that is too long; the link's target tells which.
    HidesLong,
    /// The union's own.
    Private,
}

/// Reads the name of a listed entry.
pub(crate) fn listed(name: Name<'_>) -> NameMark<'_> {
    let Some(hidden) = name.bytes().strip_prefix(PREFIX) else { return NameMark::Plain };
    if name.bytes().starts_with(LONG) {
        NameMark::HidesLong
    } else if is_reserved(hidden) {
        NameMark::Private
    } else {
        // Whiteouts of nothing, `.` and `..` hide nothing.
        Name::new(hidden).map_or(NameMark::Private, NameMark::Hides)
    }
}

/// Whether a listed entry of this type can be a whiteout in place of the name, so that its
/// attributes have to be asked for.
pub(crate) fn may_be_whiteout(kind: Option<Kind>, x_directory: bool) -> bool {
    match kind {
        None | Some(Kind::Character) => true,
        Some(Kind::File) => x_directory,
        Some(_) => false,
    }
}

/// Whether a device is taken for a whiteout unless it says otherwise.
pub(crate) fn is_whiteout_device(kind: Kind, device: (u32, u32)) -> bool {
    kind == Kind::Character && device == (0, 0)
}

/// The name of the mark that stands beside a name and hides it.
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

/// The name that the whiteout of a long name hides; `None` where the link was not made by a union.
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

/// Whether an error says that a file has no such attribute, or cannot have any.
fn lacks_attribute(error: Errno) -> bool {
    matches!(error, Errno::ENODATA | Errno::EOPNOTSUPP | Errno::ENOSYS)
}

/// The names of a file's extended attributes, NUL after each.
fn attributes(layer: &dyn Layer, node: &Node) -> Result<Vec<u8>> {
    let mut names = vec![0; 1024];
    loop {
        match layer.listxattr(&Caller::ROOT, node, &mut names) {
            Ok(length) => {
                names.truncate(length);
                return Ok(names);
            }
            // XATTR_LIST_MAX of limits.h ends this.
            Err(Errno::ERANGE) if names.len() < 1 << 17 => names.resize(names.len() * 4, 0),
            Err(error) if lacks_attribute(error) => return Ok(Vec::new()),
            Err(error) => return Err(error),
        }
    }
}

/// An extended attribute; `None` where there is none.
fn attribute(layer: &dyn Layer, node: &Node, name: &[u8]) -> Result<Option<Vec<u8>>> {
    let mut value = vec![0; 256];
    loop {
        match layer.getxattr(&Caller::ROOT, node, name, &mut value) {
            Ok(length) => {
                value.truncate(length);
                return Ok(Some(value));
            }
            // XATTR_SIZE_MAX of limits.h ends this.
            Err(Errno::ERANGE) if value.len() < 1 << 16 => value.resize(value.len() * 16, 0),
            Err(error) if lacks_attribute(error) => return Ok(None),
            Err(error) => return Err(error),
        }
    }
}

impl Marks {
    /// Finds out which namespace whoever runs this may set on a writable branch, by setting an
    /// attribute on its top and removing it.
    ///
    /// # Errors
    /// What the storage says, where it is not about the namespace.
    pub(crate) fn probe(layer: &dyn Layer, root: &Node) -> Result<Namespace> {
        const PROBE: &[u8] = b"trusted.nacre.probe";
        match layer.setxattr(&Caller::ROOT, root, PROBE, b"1", XattrFlags::default()) {
            Ok(()) => {
                layer.removexattr(&Caller::ROOT, root, PROBE)?;
                Ok(Namespace::Trusted)
            }
            Err(Errno::EPERM | Errno::EACCES) => Ok(Namespace::User),
            // No attributes at all, or not now: marks that need none work, and what is there is
            // trusted as far as it can be.
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::ENOSPC | Errno::EDQUOT | Errno::EROFS) => {
                Ok(Namespace::Trusted)
            }
            Err(error) => Err(error),
        }
    }

    /// What one branch has under a name, whiteouts beside it included. Without `reads_marks`
    /// nothing is taken for a whiteout, and nothing asked for one.
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

    /// What one branch has at the very name; whiteouts beside it are for [`stands_beside`]. Without
    /// `reads_marks` nothing is taken for a whiteout.
    ///
    /// # Errors
    /// What the storage says. A name that is too long for this branch is absent from it.
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
    /// What the storage says.
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

    /// Says of a device 0/0 that is to be a device that it is no whiteout. Before that, it must not
    /// have a name that users see.
    ///
    /// # Errors
    /// EPERM where that cannot be said.
    pub(crate) fn keep_device(&self, layer: &dyn Layer, node: &Node) -> Result<()> {
        match layer.setxattr(&Caller::ROOT, node, DEVICE, b"y", XattrFlags::default()) {
            Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => Err(Errno::EPERM),
            other => other,
        }
    }

    /// What a directory says about the branches below: two calls where it says nothing.
    ///
    /// # Errors
    /// What the storage says.
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

    /// Makes a directory opaque without putting anything in it; answers whether the storage can
    /// keep that.
    ///
    /// # Errors
    /// What the storage says.
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
    /// What the storage says.
    pub(crate) fn make_opaque(&self, layer: &dyn Layer, directory: &Node) -> Result<()> {
        let opaque = Name::new(OPAQUE)?;
        if self.style == Style::Wh {
            return stand(layer, directory, opaque);
        }
        let name = self.namespace.attribute("overlay.opaque");
        // The attribute can say only one of two things. Where it says that there are whiteouts
        // among the files, these must not come to light.
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
        // From here on it is opaque. Others read such directories as they are: whiteouts that no
        // longer hide anything would show in listings.
        let tidied = self.clear_whiteouts(layer, directory, x).and_then(|()| match x {
            true => set().and_then(|()| layer.unlink(&Caller::ROOT, directory, opaque)),
            false => Ok(()),
        });
        if let Err(error) = tidied {
            tracing::warn!(?error, "whiteouts stay in an opaque directory: other programs may list them");
        }
        Ok(())
    }

    /// Makes a directory opaque no more.
    ///
    /// # Errors
    /// What the storage says.
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

    /// Hides a name from here down. Answers true where the whiteout has taken the very name: what
    /// stood there was replaced in one step, and a directory that stood there is now in the
    /// work directory under the name `temp`. Answers false where the mark stands beside the name, which the caller
    /// then removes. `work` gives a directory of the same branch where one is needed; `temp` must be free in it.
    ///
    /// # Errors
    /// What the storage says; nothing has changed then but perhaps a file named `temp`.
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
                    // Without the right to make devices the other form does the same.
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
            // Nothing below is seen through it.
            Some(b"y") => return Ok(false),
            Some(b"x") => {}
            // First, so that there is no moment at which the whiteout shows as an empty file.
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

    /// Removes the mark beside a name, where there is one.
    ///
    /// # Errors
    /// What the storage says.
    pub(crate) fn unhide(&self, layer: &dyn Layer, directory: &Node, name: Name<'_>) -> Result<()> {
        match layer.unlink(&Caller::ROOT, directory, Name::new(&mark_name(name))?) {
            Err(Errno::ENOENT) => Ok(()),
            other => other,
        }
    }
}

/// Some names that may be whiteouts, and the position behind what was looked at.
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

/// Makes an empty file that says what its name says.
/// Whether the whiteout of a name stands in a directory, beside the name if that is there as well.
///
/// # Errors
/// What the storage says.
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

/// Puts a whiteout that was made in `work` in the place of a name, in one step.
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
        // What cannot be removed now is removed with the rest of the directory at the next start.
        let _ = layer.unlink(caller, work, temp);
        return Err(error);
    }
    Ok(true)
}
