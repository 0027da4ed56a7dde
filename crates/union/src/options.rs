//! The options of a union, and their `-o` words: those of aufs, the placement words of mergerfs, the
//! directories of overlayfs. Pure.
//!
//! Called by the readers of command lines and of fstab; words that are not the union's are returned. Each word
//! of aufs is in one of three tables: implemented, accepted without effect because what it tunes needs no
//! tuning here, or refused with a reason. docs/union.md lists them word by word, which a test checks.

mod action;
mod pool;
pub use action::{Action, ActionPolicies, ActionPolicy};
pub(crate) use pool::same;
#[cfg(test)]
mod tests;

use crate::{
    branch::{BranchMode, ParseError, parse_branches, parse_overlay, parse_pool, parse_size},
    marks::Style,
    policy::{CopyUpPolicy, CreatePolicy, Route, Routes},
    tier::TierRules,
};
use std::{
    ffi::{OsStr, OsString},
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::PathBuf,
    time::Duration,
};

/// The branches whose free space does not count in the `statfs(2)` figures of a whole union.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Ignored {
    /// No branch is ignored.
    #[default]
    Nothing,
    /// Branches that take no new files: read-only ones and `nc`.
    ReadOnly,
    /// Branches with `nc`.
    NoCreate,
}

/// The options of a union.
#[derive(Clone, Debug)]
pub struct UnionOptions {
    /// The policy for new files.
    pub create: CreatePolicy,
    /// Paths with a policy or a branch of their own.
    pub routes: Routes,
    /// No new files are created on a branch with fewer free bytes, unless the branch has its own limit; 0 for
    /// no limit.
    pub min_free: u64,
    /// The policy for copy-up.
    pub copy_up: CopyUpPolicy,
    /// The form of new whiteouts.
    pub whiteout: Style,
    /// Shows whiteouts as names; only for unions without a writable branch.
    pub show_whiteouts: bool,
    /// Copies are on stable storage before they replace the original, and `fsync(2)` and `syncfs(2)` have their
    /// effect.
    pub sync: bool,
    /// Every new directory is opaque, not only one that replaces a hidden directory.
    pub opaque_always: bool,
    /// `statfs(2)` reports the sum of all file systems, not only that of the file.
    pub sum: bool,
    /// Opening branches reports root directories whose owner or mode differs from the shown one. Nothing else
    /// depends on it.
    pub warn_permissions: bool,
    /// Maximal number of entries copied for the rename of a directory that is not on a writable branch as a
    /// whole; beyond it the error is EXDEV, upon which programs copy by themselves. 0: always EXDEV.
    pub directory_copy_limit: usize,
    /// Directories beyond that limit are renamed by a redirect on their upper part, instead of EXDEV; only
    /// where no branch below is writable.
    pub directory_redirect: bool,
    /// A write that finds a branch full moves the file to another branch, by this policy, and is tried again.
    /// Passthrough is not possible then.
    pub move_when_full: Option<CreatePolicy>,
    /// The policy for new directories, if it differs from that for files.
    pub create_directories: Option<CreatePolicy>,
    /// A directory shows the times of its most recently changed branch, not of the highest.
    pub newest_times: bool,
    /// Which changes of a directory (and, with `duplicates`, of a file) are made on all writable branches that have
    /// it, not only on the highest.
    pub actions: ActionPolicies,
    /// Copies of a file on lower writable branches are changed, renamed and removed with the file that is shown, by
    /// `actions`, instead of being hidden by it.
    pub duplicates: bool,
    /// The union's own directories on branches (`.wh..wh.*`) are created when they are first needed, and
    /// removed when they are empty.
    pub work_on_demand: bool,
    /// With `sum`: only the file systems of branches that have the file count.
    pub figures_of_path: bool,
    /// With `sum`: the branches whose free space does not count.
    pub figures_ignored: Ignored,
    /// Whether `security.capability` can be read.
    pub capabilities: bool,
    /// A name of a file with several names gets a file of its own before it is opened for writing.
    pub link_cow: bool,
    /// Files without write permission are shown as symbolic links to their file on the branch, once they have
    /// not changed for this long.
    pub symlinkify: Option<Duration>,
    /// The union may be mounted while branches are missing. Implemented by the code that opens branches.
    pub may_be_missing: bool,
    /// How long the code that opens branches waits until each is on a file system of its own.
    pub mount_timeout: Duration,
    /// The rules for moving files between branches with `+tier`.
    pub tier: TierRules,
    /// Whether the root directory has mergerfs' control file.
    pub control_file: bool,
}

/// The options that change while mounted: each is documented in [`UnionOptions`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct LiveRules {
    pub(crate) create: CreatePolicy,
    /// [`UnionOptions::create_directories`], or `create`.
    pub(crate) create_directories: Option<CreatePolicy>,
    /// [`UnionOptions::min_free`].
    pub(crate) min_free: u64,
    pub(crate) move_when_full: Option<CreatePolicy>,
    pub(crate) actions: ActionPolicies,
    pub(crate) newest_times: bool,
    pub(crate) figures_of_path: bool,
    pub(crate) figures_ignored: Ignored,
}

impl UnionOptions {
    pub(crate) fn live_rules(&self) -> LiveRules {
        LiveRules {
            create: self.create,
            create_directories: self.create_directories,
            min_free: self.min_free,
            move_when_full: self.move_when_full,
            actions: self.actions,
            newest_times: self.newest_times,
            figures_of_path: self.figures_of_path,
            figures_ignored: self.figures_ignored,
        }
    }
}

impl Default for UnionOptions {
    fn default() -> UnionOptions {
        UnionOptions {
            create: CreatePolicy::default(),
            routes: Routes::default(),
            min_free: 0,
            copy_up: CopyUpPolicy::default(),
            whiteout: Style::default(),
            show_whiteouts: false,
            sync: true,
            opaque_always: false,
            sum: false,
            warn_permissions: false,
            directory_copy_limit: 1_000,
            directory_redirect: false,
            move_when_full: None,
            create_directories: None,
            newest_times: false,
            actions: ActionPolicies::default(),
            duplicates: false,
            work_on_demand: false,
            figures_of_path: false,
            figures_ignored: Ignored::default(),
            capabilities: true,
            link_cow: false,
            symlinkify: None,
            may_be_missing: false,
            mount_timeout: Duration::ZERO,
            tier: TierRules::default(),
            control_file: false,
        }
    }
}

/// How changes made directly on branches are noticed (aufs: `udba=`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Udba {
    /// There are no direct changes: everything is cached (`coherence=exclusive`).
    None,
    /// Branches are checked each time (`coherence=revalidate`).
    Reval,
    /// Branches are watched (`coherence=watch`).
    Notify,
}

/// The parsed words of a list.
#[derive(Clone, Debug, Default)]
pub struct Words {
    /// The branches, from the top; empty if the list names none.
    pub branches: Vec<(PathBuf, BranchMode)>,
    /// The union's options.
    pub options: UnionOptions,
    /// How direct changes are noticed; `None` if the list has no word for it.
    pub udba: Option<Udba>,
    /// Whether POSIX ACLs are in effect; `None` if the list has no word for it.
    pub acl: Option<bool>,
    /// Whether there are extended attributes, including ACLs; `None` if the list has no word for it.
    pub xattr: Option<bool>,
    /// Words that were accepted and change nothing, each with the reason.
    pub unneeded: Vec<(String, &'static str)>,
    /// One sentence for the user for each word that is accepted but not implemented as it stands.
    pub notices: Vec<String>,
    /// Whether there are words that only mergerfs has: branches without attributes are writable then.
    pub pool: bool,
    /// Words that are not the union's.
    pub rest: Vec<OsString>,
    /// The words that `options` was parsed from: joined by [`Words::join`], they can be parsed again.
    pub own: Vec<OsString>,
    routes: Vec<Route>,
    /// Whether `category.action=` or a `func.` word of a change was given.
    sets_actions: bool,
    nofail: bool,
    fails_late: bool,
    symlinkify: bool,
    symlinkify_timeout: Option<u64>,
    upper: Option<OsString>,
    lower: Option<OsString>,
}

/// Words without effect here, and the reasons.
pub(crate) const UNNEEDED: [(&str, &str); 41] = [
    ("rdblk", "listings take what memory they need"),
    ("rdhash", "listings grow as they need"),
    ("rdcache", "listings are kept while nothing changes, not for a time"),
    ("dirwh", "directories full of whiteouts are moved out of sight in one step, however many there are"),
    ("plink", "hard links are always kept"),
    ("clean_plink", "there is nothing to clean: hard links are kept on the branch"),
    ("list_plink", "hard links are kept on the branch, in .wh..wh.links"),
    ("xino", "inode numbers need no tables"),
    ("noxino", "inode numbers need no tables"),
    ("xino_path", "inode numbers need no tables"),
    ("trunc_xib", "inode numbers need no tables"),
    ("notrunc_xib", "inode numbers need no tables"),
    ("trunc_xino", "inode numbers need no tables"),
    ("notrunc_xino", "inode numbers need no tables"),
    ("trunc_xino_path", "inode numbers need no tables"),
    ("itrunc_xino", "inode numbers need no tables"),
    ("dirperm1", "permissions are always those of the topmost directory"),
    ("nosum", "it is the default"),
    ("noshwh", "it is the default"),
    ("dio", "direct I/O is passed on"),
    ("nodio", "direct I/O is passed on, as in present versions of aufs"),
    ("verbose", "there is nothing to be verbose about"),
    ("v", "there is nothing to be verbose about"),
    ("quiet", "it is the default"),
    ("q", "it is the default"),
    ("silent", "it is the default"),
    ("nodlgt", "aufs itself ignores it"),
    ("delete", "aufs itself ignores it"),
    ("imap", "aufs itself ignores it"),
    ("debug", "aufs itself ignores it"),
    ("si", "aufs itself ignores it"),
    ("cache.files", "the kernel keeps pages for as long as the coherence of the branches allows"),
    ("cache.entry", "names are kept for as long as the coherence of the branches allows"),
    ("cache.negative-entry", "names are kept for as long as the coherence of the branches allows"),
    ("cache.attr", "attributes are kept for as long as the coherence of the branches allows"),
    ("cache.readdir", "listings are kept while nothing changes"),
    ("cache.symlinks", "links are kept for as long as the coherence of the branches allows"),
    ("cache.statfs", "policies say how long their figures hold: mfs:30"),
    ("cache.writeback", "the kernel writes files of the branches itself where it can"),
    ("dropcacheonclose", "pages are those of the branches, and kept once"),
    ("inodecalc", "inode numbers come from the branches"),
];

/// Refused words, and the reasons.
pub(crate) const REFUSED: [(&str, &str); 21] = [
    ("add", "it is a command here: nacre union add, del, mod"),
    ("ins", "it is a command here: nacre union add, del, mod"),
    ("append", "it is a command here: nacre union add, del, mod"),
    ("prepend", "it is a command here: nacre union add, del, mod"),
    ("del", "it is a command here: nacre union add, del, mod"),
    ("mod", "it is a command here: nacre union add, del, mod"),
    ("noplink", "hard links are always kept; leave the word out"),
    ("nodirperm1", "permissions are those of the topmost directory; leave the word out"),
    ("wsum", "it never worked in aufs either; write sum"),
    ("droplvl", "write the words that it stands for"),
    ("metacopy", "copying attributes alone is not available yet"),
    ("nfs_export", "file handles that outlive the mount are not available yet"),
    ("verity", "digests of layers are not available yet"),
    ("datadir", "data-only layers are not available yet"),
    ("uidmapping", "nacre fuse-overlayfs takes it; in a stack, put shift on top"),
    ("gidmapping", "nacre fuse-overlayfs takes it; in a stack, put shift on top"),
    ("squash_to_root", "nacre fuse-overlayfs takes it; in a stack, put shift on top"),
    ("squash_to_uid", "nacre fuse-overlayfs takes it; in a stack, put shift on top"),
    ("squash_to_gid", "nacre fuse-overlayfs takes it; in a stack, put shift on top"),
    ("xattr_permissions", "nacre fuse-overlayfs takes it; in a stack, put override-stat over the branch"),
    ("static_nlink", "directories that are merged have one link anyway; leave the word out"),
];

/// A parsed word: the name, and the value after `=` or, as aufs writes it, `:`.
struct Word<'a> {
    name: &'a str,
    value: Option<&'a OsStr>,
}

fn take_apart(word: &OsStr) -> Option<Word<'_>> {
    let bytes = word.as_bytes();
    let at = bytes.iter().position(|byte| matches!(byte, b'=' | b':'));
    let name = bytes.get(..at.unwrap_or(bytes.len()))?;
    let value = at.and_then(|at| bytes.get(at + 1..)).map(OsStr::from_bytes);
    Some(Word { name: std::str::from_utf8(name).ok()?, value })
}

/// Splits a list at its commas. A comma after a backslash is part of a word; all other backslashes stay, for
/// the parser of the word.
fn split(list: &OsStr) -> Vec<OsString> {
    let mut words = vec![Vec::new()];
    let mut bytes = list.as_bytes().iter().copied().peekable();
    while let Some(byte) = bytes.next() {
        let mut take = |byte| words.last_mut().map_or((), |word| word.push(byte));
        match (byte, bytes.peek()) {
            (b'\\', Some(b',')) => take(b','),
            (b'\\', Some(next)) => {
                take(byte);
                take(*next);
            }
            (b',', _) => {
                words.push(Vec::new());
                continue;
            }
            _ => {
                take(byte);
                continue;
            }
        }
        bytes.next();
    }
    words.into_iter().filter(|word| !word.is_empty()).map(OsString::from_vec).collect()
}

/// Whether an implemented word sets an option of the union, not its branches or how it is mounted.
fn shapes(name: &str) -> bool {
    const OTHERS: [&str; 10] =
        ["br", "dirs", "branches", "lowerdir", "upperdir", "workdir", "udba", "acl", "noacl", "xattr"];
    !OTHERS.contains(&name) && !pool::only_told(name) && UNNEEDED.iter().all(|(known, _)| !pool::same(name, known))
}

impl Words {
    /// Parses a list of words divided by commas (`br:/ssd=rw:/hdd=ro,create=mfs,noatime`).
    ///
    /// # Errors
    /// The first wrong word, with a correct one.
    pub fn parse(list: &OsStr) -> Result<Words, ParseError> {
        let mut words = Words::default();
        for word in split(list) {
            let known = match take_apart(&word) {
                Some(parts) => words.obey(&parts, &word)?.then(|| shapes(parts.name)),
                None => None,
            };
            match known {
                Some(true) => words.own.push(word),
                Some(false) => {}
                None => words.rest.push(word),
            }
        }
        words.finish()
    }

    /// Joins words to a list.
    pub fn join<'a>(words: impl IntoIterator<Item = &'a OsStr>) -> OsString {
        let mut list = Vec::new();
        for word in words {
            if !list.is_empty() {
                list.push(b',');
            }
            let mut literal = false;
            for byte in word.as_bytes() {
                if *byte == b',' && !literal {
                    list.push(b'\\');
                }
                literal = *byte == b'\\' && !literal;
                list.push(*byte);
            }
        }
        OsString::from_vec(list)
    }

    fn finish(mut self) -> Result<Words, ParseError> {
        if let Some(lower) = self.lower.take() {
            if !self.branches.is_empty() {
                return Err(ParseError::new("branches are named twice, by lowerdir= and by br:; keep one"));
            }
            self.branches = parse_overlay(self.upper.take().as_deref(), &lower)?;
        } else if self.upper.is_some() {
            return Err(ParseError::new("upperdir= needs lowerdir= beside it"));
        }
        self.finish_pool();
        self.resolve_routes()?;
        self.options.tier.check()?;
        Ok(self)
    }

    /// Resolves the branches of routes, for branches that were not named in the list.
    ///
    /// # Errors
    /// A route leads to no branch.
    pub fn with_branches(mut self, branches: Vec<(PathBuf, BranchMode)>) -> Result<Words, ParseError> {
        self.branches = branches;
        self.resolve_routes()?;
        Ok(self)
    }

    fn resolve_routes(&mut self) -> Result<(), ParseError> {
        if !self.branches.is_empty() {
            let paths: Vec<PathBuf> = self.branches.iter().map(|(path, _)| path.clone()).collect();
            self.options.routes = Routes::new(self.routes.clone(), &paths)?;
        }
        Ok(())
    }

    /// Applies a word; false if it is not the union's.
    fn obey(&mut self, word: &Word<'_>, whole: &OsStr) -> Result<bool, ParseError> {
        let options = &mut self.options;
        match word.name {
            "br" | "dirs" | "branches" => {
                if !self.branches.is_empty() {
                    return Err(ParseError::new("branches are named twice; put all of them into one br:"));
                }
                self.pool |= word.name == "branches";
                let parse = if word.name == "branches" { parse_pool } else { parse_branches };
                self.branches = parse(word.raw()?)?;
            }
            "lowerdir" => self.lower = Some(word.raw()?.to_owned()),
            "upperdir" => self.upper = Some(word.raw()?.to_owned()),
            "workdir" => {
                word.raw()?;
                self.unneeded
                    .push((word.name.to_owned(), "copies are built on the upper branch itself, in .wh..wh.work"));
            }
            "create" | "create_policy" => options.create = word.text()?.parse()?,
            "cpup" | "copyup" | "copyup_policy" => options.copy_up = word.text()?.parse()?,
            "route" => self.routes.push(Route::parse(word.raw()?)?),
            "minfreespace" => options.min_free = parse_size(word.text()?)?,
            "whiteout" => options.whiteout = word.text()?.parse()?,
            "shwh" => options.show_whiteouts = word.flag()?,
            "sum" => options.sum = word.flag()?,
            "warn_perm" => options.warn_permissions = word.flag()?,
            "nowarn_perm" => options.warn_permissions = !word.flag()?,
            "diropq" => {
                options.opaque_always = word.choice(&[(&["a", "always"], true), (&["w", "whiteouted"], false)])?
            }
            "dirren" => self.dirren(word)?,
            "nodirren" => {
                word.flag()?;
                (options.directory_copy_limit, options.directory_redirect) = (0, false);
            }
            "redirect_dir" => {
                options.directory_redirect = word.choice(&[(&["on"], true), (&["off", "follow"], false)])?
            }
            "index" => word.only("on", "hard links are always kept")?,
            "nofail" => self.nofail = word.flag()?,
            "duplicates" => options.duplicates = word.choice(&[(&["change"], true), (&["hide"], false)])?,
            "control-file" => options.control_file = word.choice(&[(&["true"], true), (&["false"], false)])?,
            "volatile" => options.sync = !word.flag()?,
            "udba" => {
                let none = (&["none"][..], Udba::None);
                let reval = (&["reval"][..], Udba::Reval);
                self.udba = Some(word.choice(&[none, reval, (&["notify", "fsnotify"], Udba::Notify)])?);
            }
            "acl" => self.acl = Some(word.flag()?),
            "noacl" => self.acl = Some(!word.flag()?),
            "xattr" => self.xattr = Some(word.choice(&[(&["passthrough"], true), (&["nosys", "noattr"], false)])?),
            "fhsm_sec" => options.tier.set("every", word.text()?)?,
            name if name.starts_with("tier.") => options.tier.set(name.trim_start_matches("tier."), word.text()?)?,
            name => {
                if self.obey_pool(word)? {
                    return Ok(true);
                }
                if let Some((_, why)) = UNNEEDED.iter().find(|(known, _)| pool::same(name, known)) {
                    self.unneeded.push((whole.to_string_lossy().into_owned(), why));
                } else if let Some((_, why)) = REFUSED.iter().find(|(known, _)| *known == name) {
                    return Err(ParseError::new(format!("{name}: {why}")));
                } else if name.starts_with("category.") {
                    return Err(ParseError::new(format!(
                        "{name}: there are category.create, category.search and category.action"
                    )));
                } else {
                    return Ok(false);
                }
            }
        }
        Ok(true)
    }

    fn dirren(&mut self, word: &Word<'_>) -> Result<(), ParseError> {
        const LIMIT: usize = 1_000;
        let (limit, redirect) = match word.value {
            None => (LIMIT, false),
            Some(_) => match word.text()? {
                "copy" => (LIMIT, false),
                "redirect" => (LIMIT, true),
                "exdev" => (0, false),
                other => match other.strip_prefix("copy:").and_then(|entries| entries.parse().ok()) {
                    Some(entries) => (entries, false),
                    None => {
                        let sentence =
                            format!("dirren={}: write copy, copy:ENTRIES, redirect or exdev", other.escape_debug());
                        return Err(ParseError::new(sentence));
                    }
                },
            },
        };
        (self.options.directory_copy_limit, self.options.directory_redirect) = (limit, redirect);
        Ok(())
    }
}

impl<'a> Word<'a> {
    fn raw(&self) -> Result<&'a OsStr, ParseError> {
        self.value
            .filter(|value| !value.is_empty())
            .ok_or_else(|| ParseError::new(format!("{}= needs a value", self.name)))
    }

    fn text(&self) -> Result<&'a str, ParseError> {
        self.raw()?.to_str().ok_or_else(|| ParseError::new(format!("{}=: the value is no UTF-8", self.name)))
    }

    /// The word as it was given.
    fn shown(&self) -> String {
        let value = self.value.map(|value| format!("={}", value.to_string_lossy().escape_debug()));
        format!("{}{}", self.name, value.unwrap_or_default())
    }

    /// Requires that the word has no value.
    fn flag(&self) -> Result<bool, ParseError> {
        match self.value {
            None => Ok(true),
            Some(_) => Err(ParseError::new(format!("{} takes no value", self.name))),
        }
    }

    /// Accepts only the value that is in effect anyway.
    fn only(&self, value: &str, why: &str) -> Result<(), ParseError> {
        match self.text()? {
            given if given == value => Ok(()),
            given => Err(ParseError::new(format!(
                "{}={}: {why}; the only value is {value}",
                self.name,
                given.escape_debug()
            ))),
        }
    }

    fn choice<T: Copy>(&self, of: &[(&[&str], T)]) -> Result<T, ParseError> {
        let given = self.text()?;
        of.iter().find(|(names, _)| names.contains(&given)).map(|(_, value)| *value).ok_or_else(|| {
            let names: Vec<&str> = of.iter().filter_map(|(names, _)| names.first().copied()).collect();
            ParseError::new(format!("{}={}: there are {}", self.name, given.escape_debug(), names.join(", ")))
        })
    }
}
