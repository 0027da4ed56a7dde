//! The words of mergerfs: which ones change a union, which only produce a notice, and which are refused. Pure.
//!
//! Called by the parser of words for names that are not aufs'. mergerfs writes names with `-` in its later
//! versions and with `_` in its earlier ones: both are accepted. Each word of its manual is in one of the
//! tables or implemented; a value that mergerfs would refuse is refused. A word that is accepted but not
//! implemented as it stands produces one sentence ([`Words::notices`]), unless its value is in effect anyway.

use super::{Action, ActionPolicies, ActionPolicy, ParseError, Word, Words};
use crate::policy::CreatePolicy;
use std::time::Duration;

/// The values that a word may have.
#[derive(Clone, Copy)]
pub(crate) enum Value {
    Bool,
    /// A whole number, which may be below zero.
    Number,
    /// A number of pages or bytes.
    Size,
    OneOf(&'static [&'static str]),
    Any,
}

/// A word without effect: its name, its values, the values without a notice, and the text of the notice.
pub(crate) type IgnoredWord = (&'static str, Value, &'static [&'static str], &'static str);

/// mergerfs' default, seconds.
const SYMLINKIFY_TIMEOUT: u64 = 3600;

const OWNERS: &str = "owners and groups are those on the branches";
const GROUPS: &str = "the kernel knows the groups of a caller";
const THREADS: &str = "requests are served by as many threads as there are CPUs";
const NO_EXDEV: &str = "files stay on their branch when they are renamed or get another name, so that there is no EXDEV to replace by a link";

/// Words that are accepted without effect.
pub(crate) const IGNORED_WORDS: [IgnoredWord; 36] = [
    ("uid", Value::Number, &[], OWNERS),
    ("gid", Value::Number, &[], OWNERS),
    ("log.metrics", Value::Bool, &["false"], "`nacre metrics` has the figures"),
    ("readdirplus", Value::Bool, &["true", "false"], ""),
    ("remember-nodes", Value::Number, &["0"], "files that the kernel has forgotten are found again on the branches"),
    ("handle-killpriv", Value::Bool, &["true"], "set-id bits are always dropped as on the branches"),
    ("handle-killpriv-v2", Value::Bool, &["true"], "set-id bits are always dropped as on the branches"),
    ("gid-cache.expire-timeout", Value::Number, &["3600"], GROUPS),
    ("gid-cache.remove-timeout", Value::Number, &["43200"], GROUPS),
    ("threads", Value::Number, &["0"], THREADS),
    ("read-thread-count", Value::Number, &["0", "-1"], THREADS),
    ("process-thread-count", Value::Number, &["0", "-1"], THREADS),
    ("process-thread-queue-depth", Value::Number, &["0", "2"], THREADS),
    ("pin-threads", Value::Any, &["", "false"], "the kernel chooses the CPUs of threads"),
    (
        "scheduling-priority",
        Value::Number,
        &["0", "-10"],
        "the process keeps the priority that it is started with (nice(1))",
    ),
    (
        "proxy-ioprio",
        Value::Bool,
        &["false"],
        "where the kernel reads and writes files by itself, it goes by the caller's priority",
    ),
    ("fuse-msg-size", Value::Size, &["256", "1M", "1m"], "the largest size is agreed upon with the kernel"),
    ("readahead", Value::Number, &["0"], "files are read ahead as the devices of the branches have it"),
    (
        "flush-on-close",
        Value::OneOf(&["never", "always", "opened-for-write"]),
        &["opened-for-write"],
        "a file that was written is flushed when it is closed",
    ),
    ("async-read", Value::Bool, &["true"], "reads are always asynchronous"),
    ("parallel-direct-writes", Value::Bool, &["true", "false"], ""),
    ("direct-io-allow-mmap", Value::Bool, &["true", "false"], ""),
    ("cache.open", Value::Number, &["0"], "what is known of files follows the coherence of the branches (udba=)"),
    ("cache.files.process-names", Value::Any, &[], "files are cached for all programs alike"),
    ("passthrough.max-stack-depth", Value::Number, &["0", "1", "2"], "the kernel is told what it needs"),
    ("ignorepponrename", Value::Bool, &["true", "false"], ""),
    ("rename-exdev", Value::OneOf(&["passthrough", "rel-symlink", "abs-symlink"]), &["passthrough"], NO_EXDEV),
    (
        "link-exdev",
        Value::OneOf(&["passthrough", "rel-symlink", "abs-base-symlink", "abs-pool-symlink"]),
        &["passthrough"],
        NO_EXDEV,
    ),
    (
        "lazy-umount-mountpoint",
        Value::Bool,
        &["false"],
        "what is mounted there stays below; `nacre umount` takes it away first",
    ),
    (
        "nfsopenhack",
        Value::OneOf(&["off", "git", "all"]),
        &["off"],
        "who has created a file may write to it, whatever its mode, as long as it is open",
    ),
    ("export-support", Value::Bool, &["true", "false"], ""),
    (
        "never-forget-nodes",
        Value::Bool,
        &["false"],
        "files that the kernel has forgotten are found again on the branches",
    ),
    ("allow-idmap", Value::Bool, &["true", "false"], ""),
    ("kernel-permissions-check", Value::Bool, &["true"], "the kernel always checks permissions"),
    ("log.file", Value::Any, &[], "write log-file=FILE, and log=trace for every request"),
    (
        "func.readdir",
        Value::Any,
        &["seq"],
        "the branches of a directory are read as far as the reader gets, and merged on the way",
    ),
];

/// Words whose values are refused; `nullrw=false` and the like are accepted.
pub(crate) const IMPOSSIBLE: [(&str, &str); 4] = [
    ("nullrw", "reads and writes are never thrown away; `nacre bench` measures without a disk"),
    (
        "follow-symlinks",
        "links would be followed as root, past directories that users may not search; if they are trusted, mount `nacre mirror --resolve-symlinks` over the union",
    ),
    ("config", "there is no file with words here; write them after -o"),
    ("mountpoint", "name the mount point after the branches"),
];

const SEARCH: [&str; 7] = ["access", "getattr", "getxattr", "ioctl", "listxattr", "open", "readlink"];

/// Whether a word of the union only produces a notice, so that the union is built without it.
pub(super) fn only_told(name: &str) -> bool {
    let is_of = |functions: &[&str]| name.strip_prefix("func.").is_some_and(|function| functions.contains(&function));
    let obeyed = ["func.getattr", "func.mkdir", "func.create"].contains(&name);
    !obeyed
        && (IGNORED_WORDS.iter().any(|(known, ..)| same(name, known)) || is_of(&SEARCH) || is_of(&["mknod", "symlink"]))
        || ["nullrw", "posix-acl", "passthrough.io"].iter().any(|known| same(name, known))
}

/// Whether a name is a word: `-` and `_` are the same.
pub(crate) fn same(name: &str, word: &str) -> bool {
    let plain = |byte: u8| if byte == b'_' { b'-' } else { byte };
    name.len() == word.len() && name.bytes().map(plain).eq(word.bytes().map(plain))
}

impl Words {
    /// Applies a word of mergerfs; false if it is none.
    pub(super) fn obey_pool(&mut self, word: &Word<'_>) -> Result<bool, ParseError> {
        let dashed = word.name.replace('_', "-");
        if dashed.starts_with("category.") || dashed.starts_with("func.") {
            self.pool = true;
        }
        match dashed.as_str() {
            "category.create" => {
                self.options.create = self.placement(word)?;
                self.options.create_directories = None;
            }
            "func.create" => self.options.create = self.placement(word)?,
            "func.mkdir" => self.options.create_directories = Some(self.placement(word)?),
            "func.mknod" | "func.symlink" => {
                self.placement(word)?;
                self.notice(word, "links and special files go where category.create= puts files");
            }
            "category.search" | "func.getattr" => {
                let policy = policy_name(word)?;
                self.options.newest_times = policy == "newest";
                if policy != "ff" && dashed == "category.search" {
                    self.notice(
                        word,
                        "what is read comes from the highest branch that has it; of directories, newest shows the newest times",
                    );
                } else if !["ff", "newest"].contains(&policy) {
                    self.notice(word, "attributes are those of the highest branch that has the file");
                }
            }
            "category.action" => {
                self.options.actions = ActionPolicies::all_by(self.action_policy(word)?);
                self.sets_actions = true;
            }
            "moveonenospc" => {
                self.options.move_when_full = match word.text()? {
                    "false" => None,
                    // As in mergerfs.
                    "true" => Some("mfs".parse()?),
                    _ => Some(self.placement(word)?),
                }
            }
            "branches-mount-timeout" => self.options.mount_timeout = Duration::from_secs(number(word)?),
            "branches-mount-timeout-fail" => self.fails_late = bool_of(word)?,
            "statfs" => {
                self.pool = true;
                self.options.figures_of_path = word.choice(&[(&["base"], false), (&["full"], true)])?;
            }
            "statfs-ignore" => {
                use crate::Ignored;
                let values =
                    [(&["none"][..], Ignored::Nothing), (&["ro"], Ignored::ReadOnly), (&["nc"], Ignored::NoCreate)];
                self.options.figures_ignored = word.choice(&values)?;
            }
            "posix-acl" => self.acl = Some(bool_of(word)?),
            "security-capability" => self.options.capabilities = bool_of(word)?,
            "passthrough.io" => {
                let on = word.choice(&[(&["off"], false), (&["rw"], true), (&["ro"], true), (&["wo"], true)])?;
                self.rest.push(if on { "passthrough=auto" } else { "passthrough=off" }.into());
            }
            "nullrw" if !bool_of(word)? => {}
            "follow-symlinks" if word.value.is_some_and(|value| value == "never") => {}
            "func.readdir" if !is_listing(word.text()?) => {
                return Err(ParseError::new(format!("{}: there are seq, cosr[:N[:M]] and cor[:N[:M]]", word.shown())));
            }
            "link-cow" => self.options.link_cow = bool_of(word)?,
            "symlinkify" => self.symlinkify = bool_of(word)?,
            "symlinkify-timeout" => self.symlinkify_timeout = Some(number(word)?),
            name => match name.strip_prefix("func.").and_then(Action::named) {
                Some(action) => {
                    if !self.sets_actions {
                        self.options.actions = ActionPolicies::all_by(ActionPolicy::ExistingAll);
                        self.sets_actions = true;
                    }
                    let policy = self.action_policy(word)?;
                    self.options.actions.set(action, policy);
                }
                None => return self.told(word, name),
            },
        }
        Ok(true)
    }

    /// Parses the policy of an action.
    fn action_policy(&mut self, word: &Word<'_>) -> Result<ActionPolicy, ParseError> {
        Ok(match policy_name(word)? {
            "all" => ActionPolicy::All,
            "epall" => ActionPolicy::ExistingAll,
            text => {
                if !["ff", "epff"].contains(&text) {
                    self.notice(word, "a change is made where the highest branch has the file");
                }
                ActionPolicy::One(text.parse()?)
            }
        })
    }

    /// Handles words without effect and refused words.
    fn told(&mut self, word: &Word<'_>, dashed: &str) -> Result<bool, ParseError> {
        if let Some((_, values, silent, why)) = IGNORED_WORDS.iter().find(|(known, ..)| *known == dashed) {
            let given = word.value.and_then(|value| value.to_str()).unwrap_or_default();
            // libfuse accepts this word without a value as well.
            let is_flag = dashed == "async-read" && word.value.is_none();
            if !is_flag {
                values.check(word)?;
            }
            if !(is_flag || silent.contains(&given) || why.is_empty()) {
                self.notice(word, why);
            }
            return Ok(true);
        }
        if IMPOSSIBLE.iter().any(|(known, _)| *known == dashed) {
            return Err(impossible(dashed));
        }
        let Some(function) = dashed.strip_prefix("func.") else { return Ok(false) };
        let policy = policy_name(word)?;
        if SEARCH.contains(&function) {
            if policy != "ff" {
                self.notice(word, "what is read comes from the highest branch that has it");
            }
        } else {
            let actions = Action::ALL.map(Action::name).join(", ");
            let known = format!("create, mkdir, mknod, symlink, readdir, {}, {actions}", SEARCH.join(", "));
            return Err(ParseError::new(format!("{}: there is no such function; there are {known}", word.shown())));
        }
        Ok(true)
    }

    fn notice(&mut self, word: &Word<'_>, instead: &str) {
        self.notices.push(format!("{}: {instead}", word.shown()));
    }

    /// Parses a policy of mergerfs that creates on one branch.
    fn placement(&mut self, word: &Word<'_>) -> Result<CreatePolicy, ParseError> {
        let one = match policy_name(word)? {
            "all" => "ff",
            "epall" => "epff",
            _ => return word.text()?.parse(),
        };
        self.notice(
            word,
            &format!("what is new is put on one branch, as {one} says; others get its directory when something in it is put there"),
        );
        one.parse()
    }

    /// Sets mergerfs' defaults for a pool without words that set them.
    pub(super) fn finish_pool(&mut self) {
        if self.pool && !self.sets_actions {
            self.options.actions = ActionPolicies::all_by(ActionPolicy::ExistingAll);
        }
        self.options.work_on_demand = self.pool;
        self.options.sum |= self.pool;
        self.options.symlinkify =
            self.symlinkify.then(|| Duration::from_secs(self.symlinkify_timeout.unwrap_or(SYMLINKIFY_TIMEOUT)));
        self.options.may_be_missing = !self.fails_late && (self.nofail || !self.options.mount_timeout.is_zero());
    }
}

/// The value as a policy name of mergerfs or aufs.
fn policy_name<'a>(word: &Word<'a>) -> Result<&'a str, ParseError> {
    let text = word.text()?;
    match text {
        "all" | "epall" => {}
        _ => drop(text.parse::<CreatePolicy>().map_err(|error| ParseError::new(format!("{}: {error}", word.name)))?),
    }
    Ok(text)
}

fn bool_of(word: &Word<'_>) -> Result<bool, ParseError> {
    word.choice(&[(&["true"], true), (&["false"], false)])
}

fn number(word: &Word<'_>) -> Result<u64, ParseError> {
    word.text()?.parse().map_err(|_| ParseError::new(format!("{}: the value is a number of seconds", word.shown())))
}

fn impossible(name: &str) -> ParseError {
    let why = IMPOSSIBLE.iter().find(|(known, _)| *known == name).map_or("", |(_, why)| *why);
    ParseError::new(format!("{name}: {why}"))
}

/// Whether a value is `seq`, or `cosr` or `cor` with numbers of threads.
fn is_listing(text: &str) -> bool {
    let mut parts = text.split(':');
    let name = parts.next();
    let numbers: Vec<&str> = parts.collect();
    let numbered = numbers.len() <= 2 && numbers.iter().all(|number| number.parse::<i32>().is_ok());
    match name {
        Some("seq") => numbers.is_empty(),
        Some("cosr" | "cor") => numbered,
        _ => false,
    }
}

impl Value {
    fn check(self, word: &Word<'_>) -> Result<(), ParseError> {
        match self {
            Value::Bool => bool_of(word).map(drop),
            Value::Number => match word.text()?.parse::<i64>() {
                Ok(_) => Ok(()),
                Err(_) => Err(ParseError::new(format!("{}: the value is a whole number", word.shown()))),
            },
            Value::Size => crate::branch::parse_size(word.text()?).map(drop),
            Value::OneOf(values) => match word.text()? {
                text if values.contains(&text) => Ok(()),
                _ => Err(ParseError::new(format!("{}: there are {}", word.shown(), values.join(", ")))),
            },
            Value::Any => Ok(()),
        }
    }
}
