//! Copying a file to a branch where it may be changed.
//!
//! Called before the first change of a file on a read-only branch, and by renames that need the file on a
//! higher branch. The copy is built in the work directory of the branch, complete with attributes, made durable
//! as configured, and renamed to its final name in one step, so that after a crash there is either no copy or a
//! whole one. Open files of the original switch to the copy. Invariants:
//! * `copying` of the node is held all the while, and `moving` for writing if the original is on a writable
//!   branch, so no thread changes either of the two;
//! * an original on a writable branch is removed when the name of the copy, and its entry in the hard-link
//!   index, are on stable storage;
//! * the parents exist before; the parent's times are restored after.

use crate::{
    OWN, UnionShared,
    branch::CopyOnOpen,
    branches::{Branch, index_directory},
    identity, marks,
    node::{NodePlace, Part, UnionNode},
    work::Temporary,
};
use nacre_vfs::{
    Attr, Errno, Kind, Layer, Name, Node, OpenFlags, Opened, Protection, RenameFlags, Result, SetAttr, SetTime, Whence,
    WriteOrigin, XattrFlags,
};
use std::sync::Arc;

/// Bytes copied between two calls of `Pace`.
const PIECE: u64 = 8 << 20;

/// Called before each piece with its size in bytes; false aborts the move.
pub(crate) type Pace<'a> = &'a mut dyn FnMut(u64) -> bool;

/// Bytes per read and write where the storage cannot copy by itself.
const BLOCK: usize = 256 << 10;

/// The longest list of names and the longest value of extended attributes (`XATTR_LIST_MAX`,
/// `XATTR_SIZE_MAX`, linux/limits.h).
const XATTR_MAX: usize = 64 << 10;

/// How often a file that is renamed meanwhile is looked up again.
const ATTEMPTS: usize = 100;

/// Which inode number a copy has.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Number {
    /// The number of the original, which the copy replaces.
    Kept,
    /// A number of its own: the copy is another file.
    Own,
}

/// The source of a copy: a file as it was shown when the copy was begun.
#[derive(Clone, Copy)]
pub(crate) struct Original<'a> {
    pub(crate) node: &'a Arc<UnionNode>,
    /// The part that is shown.
    pub(crate) part: &'a Part,
    pub(crate) attr: &'a Attr,
}

/// Parameters of a copy.
struct CopyRequest<'a> {
    number: Number,
    /// Number of bytes of the content that are needed.
    length: u64,
    pace: Option<Pace<'a>>,
}

/// A copy that has no name yet.
pub(crate) struct Built {
    pub(crate) branch: Arc<Branch>,
    temporary: Temporary,
    pub(crate) part: Part,
}

impl Built {
    /// Its name in the work directory.
    ///
    /// # Errors
    /// Never, as [`Temporary::name`].
    pub(crate) fn name(&self) -> Result<Name<'_>> {
        self.temporary.name()
    }
}

impl UnionShared {
    /// Makes sure that a file is on a branch where it may be changed, not below `most`. Of its content, only
    /// the first `length` bytes are needed.
    ///
    /// # Errors
    /// EROFS where there is no such branch; EPERM for a file of a read-only branch with `chattr +i` or `+a`;
    /// ENOSPC and other errors of the storages.
    pub(crate) fn copy_up(self: &Arc<UnionShared>, node: &Arc<UnionNode>, most: usize, length: u64) -> Result<Part> {
        if node.kind == Kind::Directory {
            return self.raise_directory(node);
        }
        let top = node.top()?;
        if top.branch.is_writable() && top.branch.index() <= most {
            return Ok(top);
        }
        let _alone = node.copying.lock();
        for _ in 0..ATTEMPTS {
            // Changes of attributes on a writable branch hold this lock for reading; a change that the copy
            // misses would be lost with the original.
            let unchanged = node.top()?.branch.is_writable().then(|| node.moving.write());
            let top = node.top()?;
            if top.branch.is_writable() && top.branch.index() <= most {
                return Ok(top);
            }
            if top.branch.is_writable() && unchanged.is_none() {
                continue;
            }
            if top.branch.is_writable() && !node.open_files().is_empty() {
                // The kernel may be writing to the file under passthrough: it has to stay on its branch.
                return Err(Errno::EXDEV);
            }
            let place = node.place().filter(|_| !node.is_gone());
            let target = self.branch_for_copy(place.as_ref(), top.branch.index(), most)?;
            let parent = place.as_ref().map(|place| self.grow(&place.parent, &target)).transpose()?;
            let attr = self.attr_of_source(node, &top)?;
            if attr.protection != Protection::None && !top.branch.is_writable() {
                // `chattr +i` or `+a`: a copy has no flags, and would be what they forbid (overlayfs refuses as well).
                return Err(Errno::EPERM);
            }
            let original = Original { node, part: &top, attr: &attr };
            let built = self.build(original, &target, length)?;
            match self.put_in_place(original, &built, place.as_ref().zip(parent.as_ref())) {
                Ok(Some(part)) => return Ok(part),
                Ok(None) => self.discard(&built),
                Err(error) => {
                    self.discard(&built);
                    return Err(error);
                }
            }
        }
        Err(Errno::EBUSY)
    }

    pub(crate) fn attr_of_source(&self, node: &Arc<UnionNode>, top: &Part) -> Result<Attr> {
        let open = node.open_files();
        let file = open.iter().find(|file| file.is_on(&top.branch)).map(|file| Arc::clone(file.present()));
        top.branch.layer.getattr(&OWN, &top.node, file.as_deref().map(|file| file.inner()))
    }

    /// Makes the copy of a file on a branch, complete and on stable storage, except for its final name.
    pub(crate) fn build(&self, original: Original<'_>, target: &Arc<Branch>, length: u64) -> Result<Built> {
        self.build_as(original, target, CopyRequest { number: Number::Kept, length, pace: None })
    }

    /// As [`Self::build`], piece by piece: `pace` is called before each one. EINTR if it returns false.
    pub(crate) fn build_paced(&self, original: Original<'_>, target: &Arc<Branch>, pace: Pace<'_>) -> Result<Built> {
        self.build_as(original, target, CopyRequest { number: Number::Kept, length: u64::MAX, pace: Some(pace) })
    }

    /// Makes a separate file with the same content and attributes.
    pub(crate) fn build_another(&self, original: Original<'_>, target: &Arc<Branch>) -> Result<Built> {
        self.build_as(original, target, CopyRequest { number: Number::Own, length: u64::MAX, pace: None })
    }

    fn build_as(&self, original: Original<'_>, target: &Arc<Branch>, request: CopyRequest<'_>) -> Result<Built> {
        let (temporary, directory) = (target.work()?.temporary(), target.work_directory()?);
        let (entry, file) = make_like(original, &target.layer, &directory, temporary.name()?)?;
        let built = Built { branch: Arc::clone(target), part: Part::new(target, entry.node, entry.attr.id), temporary };
        match self.fill(original, &built, file, request) {
            Ok(()) => Ok(built),
            Err(error) => {
                self.discard(&built);
                Err(error)
            }
        }
    }

    fn fill(
        &self,
        Original { node, part: top, attr }: Original<'_>,
        built: &Built,
        file: Option<Opened>,
        CopyRequest { number, length, pace }: CopyRequest<'_>,
    ) -> Result<()> {
        if let Some(file) = &file {
            let size = attr.size.min(length);
            let source = match node.open_files().iter().find(|open| open.is_on(&top.branch) && open.reads()) {
                Some(open) => Arc::clone(open.present()),
                None => top.branch.layer.open(&OWN, &top.node, OpenFlags::READ)?,
            };
            let end = copy_content(&source, file, size, pace)?;
            if end < size {
                let change = SetAttr { size: Some(size), ..SetAttr::default() };
                built.branch.layer.setattr(&OWN, &built.part.node, Some(file.inner()), &change)?;
            }
        }
        if marks::is_whiteout_device(attr.kind, (attr.rdev_major, attr.rdev_minor)) {
            built.branch.marks().keep_device(&*built.branch.layer, &built.part.node)?;
        }
        self.dress(top, attr, &built.part)?;
        if number == Number::Kept && !(top.branch.is_writable() && self.loses_number(node, top)) {
            identity::set_origin(&self.identities, &built.branch, &built.part.node, built.part.id, node.id)?;
        }
        match file {
            Some(file) if self.options.sync => file.fsync(false),
            _ => Ok(()),
        }
    }

    /// Copies owner, extended attributes, mode and times to a copy, in an order in which no step undoes
    /// another.
    pub(crate) fn dress(&self, from: &Part, attr: &Attr, to: &Part) -> Result<()> {
        let layer = &to.branch.layer;
        let own = layer.getattr(&OWN, &to.node, None)?;
        let owner = SetAttr {
            uid: Some(attr.uid).filter(|uid| *uid != own.uid),
            gid: Some(attr.gid).filter(|gid| *gid != own.gid),
            ..SetAttr::default()
        };
        if !owner.is_empty() {
            layer.setattr(&OWN, &to.node, None, &owner)?;
        }
        copy_xattrs(from, to)?;
        let rest = SetAttr {
            mode: Some(attr.mode).filter(|_| attr.kind != Kind::Symlink),
            atime: Some(SetTime::To(attr.atime)),
            mtime: Some(SetTime::To(attr.mtime)),
            ..SetAttr::default()
        };
        layer.setattr(&OWN, &to.node, None, &rest)?;
        Ok(())
    }

    /// Gives a copy its final name, as the last step. `None` where the file has been renamed meanwhile.
    pub(crate) fn put_in_place(
        &self,
        Original { node, part: top, attr }: Original<'_>,
        built: &Built,
        home: Option<(&NodePlace, &Part)>,
    ) -> Result<Option<Part>> {
        let Some((place, parent)) = home else { return self.put_nowhere(node, attr, built).map(Some) };
        let _unlisted = top.branch.is_writable().then(|| place.parent.listing.write());
        let _names = place.parent.names.write();
        if node.is_gone() || !node.place().is_some_and(|now| now.is(&place.parent, &place.name)) {
            return Ok(None);
        }
        let (layer, work) = (&built.branch.layer, built.branch.work_directory()?);
        let name = Name::new(&place.name)?;
        let before = layer.getattr(&OWN, &parent.node, None)?;
        self.mark_home(&place.parent, parent)?;
        self.note_hidden_with(&place.parent, &place.name, top, attr, Some(&built.part))?;
        let is_linked = attr.nlink > 1 || self.hardlinks.knows(node.id);
        if is_linked {
            let part = self.hardlinks.enter(node.id, &built.branch, built.temporary.name()?, attr.nlink)?;
            // From now on every name shows the copy, even if the copy gets no name of its own here.
            self.now_on(node, &part);
            let linked = layer.link(&OWN, &part.node, None, &parent.node, name)?;
            layer.adopt(&part.node, &linked.node);
            self.hardlinks
                .one_less(node.id, attr.nlink, &built.branch, || self.make_durable(&built.branch, &parent.node))?;
        } else {
            move_in(&**layer, (&work, built.temporary.name()?), (&parent.node, name))?;
            let learnt = learn(&built.part, parent, name);
            // The file is in place whatever the result was: an open file that cannot switch now tries again at
            // its next use.
            self.now_on(node, &built.part);
            learnt?;
        }
        self.listings.forget(place.parent.id);
        let part = node.top()?;
        self.tidy_parent(&part, parent, &before);
        if is_linked {
            self.make_durable(&built.branch, &index_directory(&built.branch)?)?;
        }
        self.make_durable(&built.branch, &parent.node)?;
        // A move between writable branches leaves no original behind.
        if !matches!(top.branch.mode().copy_on_open, CopyOnOpen::Files | CopyOnOpen::All) {
            self.remove_hidden(&place.parent.view(), &top.branch, name);
        }
        Ok(Some(part))
    }

    /// Restores the times of a branch's directory after the union has added an entry of its own accord.
    pub(crate) fn tidy_parent(&self, part: &Part, parent: &Part, before: &Attr) {
        let layer = &part.branch.layer;
        if let Err(error) = put_back_times(&**layer, &parent.node, before) {
            // The copy is in place, which is the purpose of the call.
            tracing::warn!(branch = part.branch.index(), ?error, "a directory keeps the times of a copy-up");
        }
    }

    /// Makes a file's new part current, and switches its open files to it.
    pub(crate) fn now_on(&self, node: &Arc<UnionNode>, part: &Part) {
        node.settle(vec![part.clone()], part.branch.index());
        for file in node.open_files() {
            file.follow(part);
        }
    }

    /// Places a copy without a visible name: the file has several names, which find it in the hard-link index,
    /// or none at all.
    fn put_nowhere(&self, node: &Arc<UnionNode>, attr: &Attr, built: &Built) -> Result<Part> {
        if !node.is_gone() && (attr.nlink > 1 || self.hardlinks.knows(node.id)) {
            let part = self.hardlinks.enter(node.id, &built.branch, built.temporary.name()?, attr.nlink)?;
            self.now_on(node, &part);
            self.make_durable(&built.branch, &index_directory(&built.branch)?)?;
            return Ok(part);
        }
        self.now_on(node, &built.part);
        self.discard(built);
        Ok(built.part.clone())
    }

    pub(crate) fn discard(&self, built: &Built) {
        let removed = built
            .branch
            .work_directory()
            .and_then(|work| built.branch.layer.unlink(&OWN, &work, built.temporary.name()?));
        match removed {
            Ok(()) | Err(Errno::ENOENT) => {}
            Err(error) => {
                tracing::warn!(
                    branch = built.branch.index(),
                    ?error,
                    "a temporary file stays in the work directory until the next start"
                )
            }
        }
    }
}

/// Makes an empty file of the original's type.
fn make_like(
    Original { node, part, attr }: Original<'_>,
    layer: &Arc<dyn Layer>,
    directory: &Node,
    name: Name<'_>,
) -> Result<(nacre_vfs::Entry, Option<Opened>)> {
    Ok(match node.kind {
        Kind::File => {
            let flags = OpenFlags(OpenFlags::READ_WRITE.0 | OpenFlags::EXCL);
            let (entry, file) = layer.create(&OWN, directory, name, 0o600, flags)?;
            (entry, Some(file))
        }
        Kind::Symlink => {
            let target = part.branch.layer.readlink(&OWN, &part.node)?;
            (layer.symlink(&OWN, directory, name, &target)?, None)
        }
        Kind::Directory => return Err(Errno::EISDIR),
        kind => (layer.mknod(&OWN, directory, name, kind, 0o600, (attr.rdev_major, attr.rdev_minor))?, None),
    })
}

/// Makes a file's node on its branch learn its present name.
pub(crate) fn learn(part: &Part, parent: &Part, name: Name<'_>) -> Result<()> {
    let fresh = part.branch.layer.lookup(&OWN, &parent.node, name)?;
    part.branch.layer.adopt(&part.node, &fresh.node);
    Ok(())
}

/// Moves a finished file or directory to a free name.
///
/// # Errors
/// EEXIST where another process has taken the name on the branch.
pub(crate) fn move_in(layer: &dyn Layer, from: (&Node, Name<'_>), to: (&Node, Name<'_>)) -> Result<()> {
    match layer.rename(&OWN, from.0, from.1, to.0, to.1, RenameFlags(RenameFlags::NOREPLACE)) {
        // A file system without `RENAME_NOREPLACE`.
        Err(Errno::EINVAL | Errno::EOPNOTSUPP | Errno::ENOSYS) => {
            layer.rename(&OWN, from.0, from.1, to.0, to.1, RenameFlags(0))
        }
        other => other,
    }
}

/// Restores a directory's times after a change by the union itself.
fn put_back_times(layer: &dyn Layer, directory: &Node, before: &Attr) -> Result<()> {
    let change = SetAttr {
        atime: Some(SetTime::To(before.atime)),
        mtime: Some(SetTime::To(before.mtime)),
        ..SetAttr::default()
    };
    layer.setattr(&OWN, directory, None, &change).map(|_| ())
}

/// Copies the first `size` bytes without holes; returns the end of the last piece copied.
fn copy_content(from: &Opened, to: &Opened, size: u64, mut pace: Option<Pace<'_>>) -> Result<u64> {
    let (mut at, mut end) = (0, 0);
    while at < size {
        let data = match from.seek(at, Whence::Data) {
            Ok(data) => data,
            Err(Errno::ENXIO) => break,
            Err(Errno::EINVAL | Errno::EOPNOTSUPP | Errno::ENOSYS) => at,
            Err(error) => return Err(error),
        };
        let hole = match from.seek(data, Whence::Hole) {
            Ok(hole) if hole > data => hole.min(size),
            Ok(_) | Err(Errno::EINVAL | Errno::EOPNOTSUPP | Errno::ENOSYS) => size,
            Err(Errno::ENXIO) => break,
            Err(error) => return Err(error),
        };
        if data >= size {
            break;
        }
        let until = match &mut pace {
            None => hole,
            Some(pace) => {
                let until = hole.min(data + PIECE);
                if !pace(until - data) {
                    return Err(Errno::EINTR);
                }
                until
            }
        };
        end = copy_range(from, to, data, until)?;
        if end < until {
            break;
        }
        at = until;
    }
    Ok(end)
}

/// Copies from `start` to `end`; returns the offset up to which there was data.
fn copy_range(from: &Opened, to: &Opened, start: u64, end: u64) -> Result<u64> {
    let mut at = start;
    while at < end {
        match from.copy_to(at, to.inner(), at, end - at, 0) {
            Ok(0) => break,
            Ok(copied) => at += copied,
            Err(Errno::EXDEV | Errno::EOPNOTSUPP | Errno::ENOSYS | Errno::EINVAL | Errno::EBADF) => break,
            Err(error) => return Err(error),
        }
    }
    let mut buffer = if at < end { vec![0; BLOCK] } else { Vec::new() };
    while at < end {
        let want = usize::try_from(end - at).unwrap_or(BLOCK).min(BLOCK);
        let piece = buffer.get_mut(..want).ok_or(Errno::EIO)?;
        let read = from.read(piece, at)?;
        if read == 0 {
            break;
        }
        let mut rest = piece.get(..read).ok_or(Errno::EIO)?;
        while !rest.is_empty() {
            let written = to.write(rest, at, WriteOrigin::Caller)?;
            if written == 0 {
                return Err(Errno::EIO);
            }
            rest = rest.get(written..).ok_or(Errno::EIO)?;
            at += written as u64;
        }
    }
    Ok(at)
}

/// Whether an attribute is a label that security modules give to new files by themselves.
fn is_label(name: &[u8]) -> bool {
    name.starts_with(b"security.") && name != b"security.capability"
}

/// Copies extended attributes (including access control lists and capabilities), except for the union's own
/// marks.
fn copy_xattrs(from: &Part, to: &Part) -> Result<()> {
    let mut names = vec![0; XATTR_MAX];
    let size = match from.branch.layer.listxattr(&OWN, &from.node, &mut names) {
        Err(Errno::EOPNOTSUPP | Errno::ENOSYS) => return Ok(()),
        other => other?,
    };
    names.truncate(size);
    let mut value = Vec::new();
    for name in names.split(|byte| *byte == 0).filter(|name| !name.is_empty() && !marks::is_private_xattr(name)) {
        value.resize(XATTR_MAX, 0);
        let copied = match from.branch.layer.getxattr(&OWN, &from.node, name, &mut value) {
            // Removed meanwhile.
            Err(Errno::ENODATA) => continue,
            Ok(size) => to.branch.layer.setxattr(
                &OWN,
                &to.node,
                name,
                value.get(..size).unwrap_or_default(),
                XattrFlags::default(),
            ),
            Err(error) => Err(error),
        };
        match copied {
            Err(Errno::EPERM | Errno::EOPNOTSUPP) if is_label(name) => {}
            Err(error) if !to.branch.mode().ignores_xattr(name) => return Err(error),
            _ => {}
        }
    }
    Ok(())
}
