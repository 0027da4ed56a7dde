//! Exchange of two names of a branch, also where its storage has none (`RENAME_EXCHANGE`): file systems in
//! userspace that know no flags of rename, such as bindfs and mergerfs, and NFS.
//!
//! Called where a whiteout or a fresh directory takes the place of a directory (`marks.rs`, `create.rs`,
//! `rename.rs`), not for an exchange that a user asks for. Invariant: the names of both directories are held,
//! so users see no step in between. A crash of the machine or a kill of the process between two of the three
//! renames may show what lies below a name, as with fuse-overlayfs.

use crate::OWN;
use nacre_vfs::{Caller, Errno, Layer, Name, Node, RenameFlags, Result};

/// Two names, and a free name in the work directory.
pub(crate) struct Swap<'a> {
    pub(crate) layer: &'a dyn Layer,
    /// In whose name the first is moved to the second; all else is done in the union's.
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
    /// What the storage says; the names are as they were then, unless it refuses that, too.
    pub(crate) fn run(&self) -> Result<()> {
        let exchange = RenameFlags(RenameFlags::EXCHANGE);
        match self.layer.rename(self.caller, self.from, self.from_name, self.to, self.to_name, exchange) {
            // ENOSYS from FUSE, EINVAL from the kernel in the name of file systems without flags.
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
