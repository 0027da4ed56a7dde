//! Exchange of two names on a branch, also where its storage has no `RENAME_EXCHANGE`: FUSE file systems
//! without rename flags, such as bindfs and mergerfs, and NFS.
//!
//! Called where a whiteout or a new directory replaces a directory (`marks.rs`, `create.rs`, `rename.rs`), not
//! for an exchange that a user requests. Invariant: the names of both directories are locked, so users see no
//! intermediate state. A crash of the machine or a kill of the process between two of the three renames may
//! make the lower directory of a name visible, as with fuse-overlayfs.

use crate::OWN;
use nacre_vfs::{Caller, Errno, Layer, Name, Node, RenameFlags, Result};

/// Two names, and a free name in the work directory.
pub(crate) struct Swap<'a> {
    pub(crate) layer: &'a dyn Layer,
    /// The caller of the rename of the first name to the second; all other steps are the union's own.
    pub(crate) caller: &'a Caller,
    pub(crate) from: &'a Node,
    pub(crate) from_name: Name<'a>,
    pub(crate) to: &'a Node,
    pub(crate) to_name: Name<'a>,
    pub(crate) work: &'a Node,
    pub(crate) aside: Name<'a>,
}

impl Swap<'_> {
    /// Exchanges the names.
    ///
    /// # Errors
    /// Errors of the storage; the names are then unchanged, unless undoing the steps fails, too.
    pub(crate) fn run(&self) -> Result<()> {
        let exchange = RenameFlags(RenameFlags::EXCHANGE);
        match self.layer.rename(self.caller, self.from, self.from_name, self.to, self.to_name, exchange) {
            // ENOSYS from FUSE, EINVAL from the kernel on behalf of file systems without flags.
            Err(Errno::EINVAL | Errno::ENOSYS | Errno::EOPNOTSUPP) => self.in_three_steps(),
            other => other,
        }
    }

    fn in_three_steps(&self) -> Result<()> {
        let set_aside = || self.step(self.to, self.to_name, self.work, self.aside);
        let put_back = || self.step(self.work, self.aside, self.to, self.to_name);
        set_aside()?;
        let moved = self.layer.rename(self.caller, self.from, self.from_name, self.to, self.to_name, RenameFlags(0));
        if let Err(error) = moved {
            put_back()?;
            return Err(error);
        }
        if let Err(error) = self.step(self.work, self.aside, self.from, self.from_name) {
            self.step(self.to, self.to_name, self.from, self.from_name)?;
            put_back()?;
            return Err(error);
        }
        Ok(())
    }

    fn step(&self, from: &Node, name: Name<'_>, to: &Node, new_name: Name<'_>) -> Result<()> {
        self.layer.rename(&OWN, from, name, to, new_name, RenameFlags(0))
    }
}
