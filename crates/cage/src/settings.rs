//! Settings of a cage as text, and their conversion to its options.

use crate::{CageOptions, Storage, check_globs, ledger::Limits};
use nacre_layers::{
    accounts::{Accounts, Everybody, user_id},
    context::Context,
    settings,
    settings::SpecError,
    size::{LimitRule, Share, Size},
    words,
};
use nacre_vfs::Errno;
use std::path::PathBuf;

words! {
    /// Write modes of a cage.
    pub enum Writes {
        /// Write-back where the limit is large enough for it, else one request per write.
        #[default]
        Auto = "auto",
        /// Write-back: the kernel collects appends while there is room.
        Collected = "collected",
        /// Every write is a request.
        Through = "through",
    }
}

words! {
    /// Actions of a cage when something does not fit.
    pub enum WhenFull {
        /// The call fails.
        #[default]
        Deny = "deny",
        /// The oldest rotated files are removed, then the beginning of the largest growing file.
        DropOldest = "drop-oldest",
    }
}

words! {
    /// Error of a call that exceeds the limit of the whole cage or of a directory in it. A full disk is always ENOSPC,
    /// a user's limit always EDQUOT.
    pub enum LimitError {
        /// As on a full file system.
        #[default]
        NoSpace = "ENOSPC",
        /// As with a quota: programs can distinguish the limit from a full disk.
        Quota = "EDQUOT",
    }
}

impl LimitError {
    /// Its number.
    pub const fn errno(self) -> Errno {
        match self {
            LimitError::NoSpace => Errno::ENOSPC,
            LimitError::Quota => Errno::EDQUOT,
        }
    }
}

settings! {
    /// Limits of stored data. Sizes are numbers with a suffix of 1024 (`10G`, `1.5T`).
    pub struct CageSpec {
        /// Bytes of all files together.
        "size" => size: Option<String>,
        /// Files of any kind.
        "inodes" => inodes: Option<u64>,
        /// Write mode.
        "writes" => writes: Writes,
        /// Action when something does not fit.
        "when-full" => when_full: WhenFull,
        /// Error of a call that exceeds the limit of the whole cage or of a directory.
        "error" => error: LimitError,
        /// With `when-full=drop-oldest`: globs of names or paths that are never removed or cut; may
        /// be given several times.
        "keep" => keep: Vec<String>,
        /// With `when-full=drop-oldest`: globs of rotated files, replacing the default ones; may be
        /// given several times.
        "rotated" => rotated: Vec<String>,
        /// Usage from which on `on-soft` is run: a share of the size (`80%`) or a size.
        "soft" => soft: Option<String>,
        /// A command for the shell, run when usage reaches `soft` and when it has fallen below
        /// again.
        "on-soft" => on_soft: Option<String>,
        /// `user:NAME=SIZE` or `dir:PATH=SIZE`; may be given several times.
        "limit" => limit: Vec<String>,
        /// A directory in which the accounts are saved; without it, everything is counted at each
        /// start.
        "state" => state: Option<PathBuf>,
    }
}

/// Prefixes an error with the key of the bad value.
fn within<T, E: std::fmt::Display>(key: &str, result: Result<T, E>) -> Result<T, SpecError> {
    result.map_err(|why| SpecError(format!("\"{key}\": {why}")))
}

impl CageSpec {
    /// Limits with user names resolved to ids.
    ///
    /// # Errors
    /// Malformed sizes or limits, sizes below a block, users that do not exist, duplicate limits.
    pub fn limits(&self, context: &Context) -> Result<Limits, SpecError> {
        self.limits_of(&*context.accounts)
    }

    /// Checks the syntax of all settings, without looking up users on this machine.
    ///
    /// # Errors
    /// As [`CageSpec::limits`], and malformed patterns.
    pub fn check(&self) -> Result<(), SpecError> {
        self.limits_of(&Everybody::default())?;
        check_globs(&self.keep, &self.rotated).map_err(SpecError)
    }

    fn limits_of(&self, accounts: &dyn Accounts) -> Result<Limits, SpecError> {
        let bytes = match &self.size {
            Some(size) => Some(within("size", size.parse::<Size>().and_then(Size::limit))?),
            None => None,
        };
        let soft = match (&self.soft, bytes) {
            (None, _) => None,
            (Some(soft), limit) => match within("soft", soft.parse::<Share>())? {
                Share::Percent(_) if limit.is_none() => {
                    return Err(SpecError(
                        "\"soft\": a percentage needs a size that it is a part of; give one, or a size here".to_owned(),
                    ));
                }
                share => Some(share.of(limit.unwrap_or(u64::MAX))),
            },
        };
        if self.inodes == Some(0) {
            return Err(SpecError(
                "\"inodes\": with 0 no file could be made; give the number of files and directories".to_owned(),
            ));
        }
        let mut limits = Limits { bytes, inodes: self.inodes, soft, ..Limits::default() };
        for (rule, text) in self.rules()?.into_iter().zip(&self.limit) {
            let twice = || SpecError(format!("\"limit\": \"{}\" is given twice", text.escape_debug()));
            match rule {
                LimitRule::User(name, size) => {
                    let uid = within("limit", user_id(accounts, &name))?;
                    let size = within("limit", size.limit())?;
                    if limits.users.insert(uid, size).is_some() {
                        return Err(twice());
                    }
                }
                LimitRule::Directory(_, size) => limits.dirs.push(within("limit", size.limit())?),
            }
        }
        let mut dirs = self.dirs()?;
        dirs.sort_unstable();
        match dirs.windows(2).find(|pair| pair.first() == pair.last()) {
            Some(pair) => Err(SpecError(format!(
                "\"limit\": the directory \"{}\" is given twice",
                pair.first().map_or(String::new(), |path| path.escape_ascii().to_string())
            ))),
            None => Ok(limits),
        }
    }

    fn rules(&self) -> Result<Vec<LimitRule>, SpecError> {
        self.limit.iter().map(|text| within("limit", text.parse())).collect()
    }

    /// The directories with a limit of their own, in the order of [`Limits::dirs`].
    ///
    /// # Errors
    /// Malformed limits.
    pub fn dirs(&self) -> Result<Vec<Vec<u8>>, SpecError> {
        let path = |rule| match rule {
            LimitRule::Directory(path, _) => Some(path.into_bytes()),
            LimitRule::User(..) => None,
        };
        Ok(self.rules()?.into_iter().filter_map(path).collect())
    }

    /// All options of the cage.
    ///
    /// # Errors
    /// As for [`CageSpec::limits`], or no limit at all: neither size, files, users nor directories.
    pub fn options(&self, context: &Context, name: String, storage: Storage) -> Result<CageOptions, SpecError> {
        let limits = self.limits(context)?;
        if limits.bytes.is_none() && limits.inodes.is_none() && limits.users.is_empty() && limits.dirs.is_empty() {
            return Err(SpecError("\"size\" is missing; write how much may be stored, as in size=10G".to_owned()));
        }
        if self.on_soft.is_some() && self.soft.is_none() {
            return Err(SpecError(
                "\"on-soft\" needs \"soft\": write from which use on it is to be run, as in soft=80%".to_owned(),
            ));
        }
        Ok(CageOptions {
            limits,
            dirs: self.dirs()?,
            writes: self.writes,
            when_full: self.when_full,
            error: self.error,
            keep: self.keep.clone(),
            rotated: self.rotated.clone(),
            on_soft: self.on_soft.clone(),
            name,
            state: self.state.clone(),
            storage,
        })
    }
}
