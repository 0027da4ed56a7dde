//! What a cage is asked to be, as plain data: filled in by [`crate::settings`] from the options as
//! given, read by [`super::plan`].

use nacre_daemon::cage::engine::FileSystem;
use nacre_layers::size::Size;
use nacre_stack::spec::{CageSpec, LayerSpec, WhenFull, Writes};
use std::path::PathBuf;

/// Settings that only a cage has. Texts are well-formed; users and directories that they name are
/// looked up when the cage is made.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CageSettings {
    /// How much it may hold.
    pub size: Option<Size>,
    /// How many inodes.
    pub inodes: Option<u64>,
    /// What happens then.
    pub when_full: WhenFull,
    /// Names of files that may be deleted as a whole.
    pub rotated: Vec<String>,
    /// Names of files that are never touched.
    pub keep: Vec<String>,
    /// When to report.
    pub soft: Option<String>,
    /// What to run then.
    pub on_soft: Option<String>,
    /// Limits of users and directories.
    pub limits: Vec<String>,
    /// How writes arrive.
    pub writes: Writes,
    /// Where the accounting is kept.
    pub state: Option<PathBuf>,
    /// File system of the image.
    pub fstype: Option<FileSystem>,
    /// The image.
    pub image: Option<PathBuf>,
    /// Whether the image takes space only as it fills.
    pub sparse: bool,
}

impl CageSettings {
    /// The layer that the engine fuse stacks on the directory.
    pub fn layer(&self) -> LayerSpec {
        LayerSpec::Cage(Box::new(CageSpec {
            size: self.size.map(|size| size.to_string()),
            inodes: self.inodes,
            writes: self.writes,
            when_full: self.when_full,
            keep: self.keep.clone(),
            rotated: self.rotated.clone(),
            soft: self.soft.clone(),
            on_soft: self.on_soft.clone(),
            limit: self.limits.clone(),
            state: self.state.clone(),
        }))
    }
}
