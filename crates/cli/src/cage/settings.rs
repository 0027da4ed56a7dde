//! Settings of a cage, as plain data: filled in by [`crate::settings`] from the given options, read
//! by [`super::plan`].

use nacre_daemon::cage::engine::FileSystem;
use nacre_layers::size::Size;
use nacre_stack::spec::{CageSpec, LayerSpec, WhenFull, Writes};
use std::path::PathBuf;

/// Settings that only a cage has. Their syntax has been checked; users and directories that they
/// name are looked up when the cage is created.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct CageSettings {
    /// Limit of the content's size.
    pub size: Option<Size>,
    /// Limit of the number of inodes.
    pub inodes: Option<u64>,
    /// Policy when the limit is reached.
    pub when_full: WhenFull,
    /// Name patterns of files that may be deleted whole to make room.
    pub rotated: Vec<String>,
    /// Name patterns of files that are never touched to make room.
    pub keep: Vec<String>,
    /// Soft limit: reaching it is reported.
    pub soft: Option<String>,
    /// Program to run when the soft limit is reached.
    pub on_soft: Option<String>,
    /// Limits of users and directories.
    pub limits: Vec<String>,
    /// Write mode.
    pub writes: Writes,
    /// Directory of the cage's accounting.
    pub state: Option<PathBuf>,
    /// File system in the image.
    pub fstype: Option<FileSystem>,
    /// Path of the image.
    pub image: Option<PathBuf>,
    /// Whether the image takes space only as it fills.
    pub sparse: bool,
}

impl CageSettings {
    /// Returns the cage layer that the engine `fuse` stacks on the directory.
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
            ..CageSpec::default()
        }))
    }
}
