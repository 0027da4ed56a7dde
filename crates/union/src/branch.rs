//! Branches as users write them: `PATH=ATTRIBUTES`, several divided by `:`. Pure.
//!
//! aufs' attributes (`rw`, `ro+wh`) and mergerfs' (`RW`, `NC,4G`) are accepted alike, in any mixture. A
//! backslash takes the next character literally, for paths with a colon, an equals sign or a comma. An unknown
//! attribute is an error: aufs makes the branch read-only without a message.

#[cfg(test)]
mod tests;

use std::{
    ffi::{OsStr, OsString},
    fmt,
    os::unix::ffi::{OsStrExt, OsStringExt},
    path::{Path, PathBuf},
    str::FromStr,
};

/// The maximal number of branches, as in aufs by default; their numbers have to fit into positions of listings.
pub const BRANCHES_MAX: usize = 127;

/// Why a text was refused: a sentence for the user.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ParseError(String);

impl ParseError {
    /// Creates an error with this sentence.
    pub fn new(sentence: impl Into<String>) -> ParseError {
        ParseError(sentence.into())
    }
}

impl fmt::Display for ParseError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for ParseError {}

/// The permitted operations on a branch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Permission {
    /// All operations (`rw`).
    Rw,
    /// No changes (`ro`).
    Ro,
    /// No changes, and the medium itself is read-only (`rr`).
    Rr,
    /// Files are changed and removed, but none are created there (mergerfs: `nc`).
    Nc,
}

impl fmt::Display for Permission {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Permission::Rw => "rw",
            Permission::Ro => "ro",
            Permission::Rr => "rr",
            Permission::Nc => "nc",
        })
    }
}

/// Classes of extended attributes, as a set (aufs: `icexsec`, `icexsys`, `icextr`, `icexusr`,
/// `icexoth`).
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct XattrClasses(u8);

/// Each attribute word with its class of extended attributes and the prefix of their names; the last class has
/// all remaining attributes.
const CLASSES: [(&str, u8, &str); 5] = [
    ("icexsec", 1, "security."),
    // POSIX ACLs.
    ("icexsys", 2, "system."),
    ("icextr", 4, "trusted."),
    ("icexusr", 8, "user."),
    ("icexoth", 16, ""),
];

const ALL_CLASSES: u8 = 31;

impl XattrClasses {
    /// Whether an attribute is in one of the classes.
    pub fn has(self, name: &[u8]) -> bool {
        let class =
            CLASSES.iter().find(|(_, _, prefix)| name.starts_with(prefix.as_bytes())).map_or(0, |(_, bit, _)| *bit);
        self.0 & class != 0
    }
}

/// The attributes of a branch: permission and options.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BranchMode {
    /// The permitted operations.
    pub permission: Permission,
    /// Whiteouts count although the branch is read-only (`+wh`).
    pub whiteouts: bool,
    /// Errors in copying attributes of these classes to this branch are ignored (`+icex*`).
    pub ignore_xattr: XattrClasses,
    /// No files are created there while fewer bytes than this are free (`+minfree=SIZE`; `None`: the union's
    /// limit).
    pub min_free: Option<u64>,
    /// The action when a file on the branch is opened.
    pub copy_on_open: CopyOnOpen,
    /// The branch is a tier: the tiering rules move files from it and to it (`+fhsm`, `+tier`).
    pub tier: bool,
}

/// The action when a file is opened, even only for reading.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum CopyOnOpen {
    /// No action.
    #[default]
    No,
    /// A regular file is copied up to the nearest branch above that takes new files (aufs: `coo_reg`).
    Files,
    /// As `Files`; directories are created there as well, without their entries (`coo_all`).
    All,
    /// A regular file is moved there (`moo`).
    Move,
}

impl CopyOnOpen {
    fn word(self) -> &'static str {
        match self {
            CopyOnOpen::No => "",
            CopyOnOpen::Files => "+coo_reg",
            CopyOnOpen::All => "+coo_all",
            CopyOnOpen::Move => "+moo",
        }
    }
}

/// The accepted attribute words, as listed in error messages.
const KNOWN: &str = "rw, ro, rr and nc, each with +wh, +nolwh, +unpin, +coo_reg, +coo_all, +moo, +tier, +icex, +icexsec, +icexsys, +icextr, +icexusr, +icexoth, +minfree=SIZE";

impl BranchMode {
    fn with(permission: Permission) -> BranchMode {
        BranchMode {
            permission,
            whiteouts: false,
            ignore_xattr: XattrClasses::default(),
            min_free: None,
            copy_on_open: CopyOnOpen::No,
            tier: false,
        }
    }

    /// Readable and writable.
    pub fn rw() -> BranchMode {
        BranchMode::with(Permission::Rw)
    }

    /// Read-only.
    pub fn ro() -> BranchMode {
        BranchMode::with(Permission::Ro)
    }

    /// Read-only, with whiteouts of its own: a layer made by another program.
    pub fn layer() -> BranchMode {
        BranchMode { whiteouts: true, ..BranchMode::ro() }
    }

    /// Parses `rw`, `ro+wh`, `NC,4G` and the like.
    ///
    /// # Errors
    /// A word that is unknown, not available yet, or makes no sense at its position.
    pub fn parse(text: &str) -> Result<BranchMode, ParseError> {
        let mut words = text.split(['+', ',']);
        let first = words.next().unwrap_or_default();
        let mut mode = BranchMode::with(match first.to_ascii_lowercase().as_str() {
            "rw" => Permission::Rw,
            "ro" => Permission::Ro,
            "rr" => Permission::Rr,
            "nc" => Permission::Nc,
            _ => return Err(unknown(first)),
        });
        for word in words {
            mode.add(word)?;
        }
        Ok(mode)
    }

    fn add(&mut self, word: &str) -> Result<(), ParseError> {
        match word {
            "wh" if self.writable() => {
                return Err(ParseError(format!(
                    "+wh goes with ro and rr: on {} branches whiteouts always count",
                    self.permission
                )));
            }
            "wh" => self.whiteouts = true,
            // Each whiteout is a file of its own; branches can be renamed.
            "nolwh" | "unpin" => {}
            "icex" => self.ignore_xattr.0 = ALL_CLASSES,
            // The last of these words counts.
            "coo_reg" => self.copy_on_open = CopyOnOpen::Files,
            "coo_all" => self.copy_on_open = CopyOnOpen::All,
            "moo" if self.permission != Permission::Rw => {
                return Err(ParseError(format!(
                    "+moo goes with rw: nothing can be moved off {} branches",
                    self.permission
                )));
            }
            "moo" => self.copy_on_open = CopyOnOpen::Move,
            "fhsm" | "tier" if self.permission != Permission::Rw => {
                return Err(ParseError(format!("+{word} goes with rw: files are put on tiers and taken off them")));
            }
            "fhsm" | "tier" => self.tier = true,
            _ => {
                if let Some((_, bit, _)) = CLASSES.iter().find(|(class, ..)| *class == word) {
                    self.ignore_xattr.0 |= bit;
                } else if let Some(size) = word.strip_prefix("minfree=") {
                    self.min_free = Some(parse_size(size)?);
                } else if word.starts_with(|first: char| first.is_ascii_digit()) {
                    // As mergerfs writes it.
                    self.min_free = Some(parse_size(word)?);
                } else {
                    return Err(unknown(word));
                }
            }
        }
        Ok(())
    }

    /// Whether files on the branch may be changed.
    pub fn writable(&self) -> bool {
        matches!(self.permission, Permission::Rw | Permission::Nc)
    }

    /// Whether new files may be created on the branch.
    pub fn creates(&self) -> bool {
        self.permission == Permission::Rw
    }

    /// Whether whiteouts and opaque directories on the branch count.
    pub fn reads_marks(&self) -> bool {
        self.whiteouts || self.writable()
    }

    /// Whether an error in copying this extended attribute to this branch is ignored.
    pub fn ignores_xattr(&self, name: &[u8]) -> bool {
        self.ignore_xattr.has(name)
    }
}

fn unknown(word: &str) -> ParseError {
    ParseError(format!(
        "\"{}\" is no branch attribute; there are {KNOWN}. (An equals sign that belongs to the path is written \\=)",
        word.escape_debug()
    ))
}

/// Writes the form that [`BranchMode::parse`] reads.
impl fmt::Display for BranchMode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.permission)?;
        if self.whiteouts {
            f.write_str("+wh")?;
        }
        if self.ignore_xattr.0 == ALL_CLASSES {
            f.write_str("+icex")?;
        } else {
            for (word, bit, _) in CLASSES {
                if self.ignore_xattr.0 & bit != 0 {
                    write!(f, "+{word}")?;
                }
            }
        }
        f.write_str(self.copy_on_open.word())?;
        if self.tier {
            f.write_str("+tier")?;
        }
        self.min_free.map_or(Ok(()), |bytes| write!(f, "+minfree={bytes}"))
    }
}

impl FromStr for BranchMode {
    type Err = ParseError;

    fn from_str(text: &str) -> Result<BranchMode, ParseError> {
        BranchMode::parse(text)
    }
}

/// Parses a number of bytes: digits, and K, M, G, T or P of 1024 in either case, optionally with `B` or `iB`.
///
/// # Errors
/// Any other text, and a number too large.
pub fn parse_size(text: &str) -> Result<u64, ParseError> {
    let bad = || {
        ParseError(format!(
            "\"{}\" is no size; write bytes or a number with one of K, M, G, T, P (of 1024), as in 4G",
            text.escape_debug()
        ))
    };
    let written = nacre_size::Written::new(text);
    // As mergerfs reads them: no decimals, and nothing beyond P.
    let shift = nacre_size::shift(written.unit).filter(|shift| *shift <= 50 && written.decimals.is_none());
    if written.is_empty() { Err(bad()) } else { shift.and_then(|shift| written.bytes(shift)).ok_or_else(bad) }
}

/// Bytes of a text, each with whether it was written without a backslash and can be a divider.
pub(crate) type Escaped = [(u8, bool)];

/// A text with its backslash escapes decoded.
pub(crate) struct Unescaped {
    bytes: Vec<(u8, bool)>,
}

impl Unescaped {
    pub(crate) fn new(text: &OsStr) -> Unescaped {
        let (mut bytes, mut rest) = (Vec::new(), text.as_bytes().iter());
        while let Some(byte) = rest.next() {
            bytes.push(match (byte, rest.as_slice().first()) {
                (b'\\', Some(next)) => {
                    rest.next();
                    (*next, false)
                }
                _ => (*byte, true),
            });
        }
        Unescaped { bytes }
    }

    /// The parts between unescaped `divider`s.
    pub(crate) fn split(&self, divider: u8) -> impl Iterator<Item = &Escaped> {
        self.bytes.split(move |byte| *byte == (divider, true))
    }
}

/// The bytes without the flags.
pub(crate) fn plain(bytes: &Escaped) -> OsString {
    OsString::from_vec(bytes.iter().map(|(byte, _)| *byte).collect())
}

/// Escapes a path for a list of branches.
pub fn escape_path(path: &Path) -> OsString {
    let mut text = Vec::new();
    for byte in path.as_os_str().as_bytes() {
        if matches!(byte, b':' | b'=' | b',' | b'\\') {
            text.push(b'\\');
        }
        text.push(*byte);
    }
    OsString::from_vec(text)
}

/// Reads `PATH[=ATTRIBUTES]:...`. Without attributes the first branch is `rw` and all others are
/// `ro`, as in aufs.
///
/// # Errors
/// An unknown attribute, an empty path, more than [`BRANCHES_MAX`] branches.
pub fn parse_branches(text: &OsStr) -> Result<Vec<(PathBuf, BranchMode)>, ParseError> {
    parse_list(text, |index| if index == 0 { BranchMode::rw() } else { BranchMode::ro() })
}

/// Parses one `PATH[=ATTRIBUTES]`; `default` is the mode without attributes.
///
/// # Errors
/// As [`parse_branches`], and a plain colon.
pub fn parse_one(text: &OsStr, default: BranchMode) -> Result<(PathBuf, BranchMode), ParseError> {
    let unescaped = Unescaped::new(text);
    let mut parts = unescaped.split(b':');
    match (parts.next(), parts.next()) {
        (Some(part), None) => parse_branch(part, || default.clone()),
        _ => Err(ParseError("a colon divides branches; one that belongs to the path is written \\:".to_owned())),
    }
}

/// Parses a list of branches in mergerfs' form: without attributes all are `rw`.
///
/// # Errors
/// As [`parse_branches`].
pub fn parse_pool(text: &OsStr) -> Result<Vec<(PathBuf, BranchMode)>, ParseError> {
    parse_list(text, |_| BranchMode::rw())
}

/// Parses overlayfs' `upperdir` and `lowerdir`: the upper branch is `rw`, each lower one `ro+wh`.
///
/// # Errors
/// An empty path, data-only layers (`::`), too many branches, none at all.
pub fn parse_overlay(upper: Option<&OsStr>, lower: &OsStr) -> Result<Vec<(PathBuf, BranchMode)>, ParseError> {
    let unescaped = Unescaped::new(lower);
    let mut branches: Vec<(PathBuf, BranchMode)> = Vec::new();
    if let Some(upper) = upper {
        branches.push((PathBuf::from(upper), BranchMode::rw()));
    }
    for part in unescaped.split(b':') {
        if part.is_empty() {
            return Err(ParseError(
                "lowerdir has an empty part; data-only layers (::) are not available yet".to_owned(),
            ));
        }
        branches.push((PathBuf::from(plain(part)), BranchMode::layer()));
    }
    limit(branches)
}

fn parse_list(text: &OsStr, default: impl Fn(usize) -> BranchMode) -> Result<Vec<(PathBuf, BranchMode)>, ParseError> {
    let unescaped = Unescaped::new(text);
    let branches = unescaped.split(b':').enumerate().map(|(index, part)| parse_branch(part, || default(index)));
    limit(branches.collect::<Result<_, _>>()?)
}

fn limit(branches: Vec<(PathBuf, BranchMode)>) -> Result<Vec<(PathBuf, BranchMode)>, ParseError> {
    if branches.len() > BRANCHES_MAX {
        return Err(ParseError(format!("{} branches are more than a union can have ({BRANCHES_MAX})", branches.len())));
    }
    Ok(branches)
}

fn parse_branch(part: &Escaped, default: impl Fn() -> BranchMode) -> Result<(PathBuf, BranchMode), ParseError> {
    let (path, mode) = match divide(part) {
        Some((path, mode)) => {
            let mode = plain(mode);
            (path, BranchMode::parse(&mode.to_string_lossy())?)
        }
        None => (part, default()),
    };
    if path.is_empty() {
        return Err(ParseError("a branch has no path; write PATH=ATTRIBUTES, divided by colons".to_owned()));
    }
    Ok((PathBuf::from(plain(path)), mode))
}

/// Splits at the last equals sign that does not belong to `minfree=` after another one.
fn divide(part: &Escaped) -> Option<(&Escaped, &Escaped)> {
    let mut end = part.len();
    loop {
        let at = part.get(..end)?.iter().rposition(|byte| *byte == (b'=', true))?;
        let (path, mode) = (part.get(..at)?, part.get(at + 1..)?);
        let before = plain(path);
        let word = before.as_bytes().rsplit(|byte| matches!(byte, b'+' | b',')).next();
        if word != Some(b"minfree") || !path.contains(&(b'=', true)) {
            return Some((path, mode));
        }
        end = at;
    }
}

/// Checks that no branch is inside another or below the mount point. All paths must be canonical.
///
/// # Errors
/// Names the two paths.
pub fn check_overlap(branches: &[PathBuf], mount_point: Option<&Path>) -> Result<(), ParseError> {
    for (index, branch) in branches.iter().enumerate() {
        for other in branches.iter().skip(index + 1) {
            if branch == other {
                return Err(ParseError(format!("{} is given twice", branch.display())));
            }
            if branch.starts_with(other) || other.starts_with(branch) {
                let (inner, outer) = if branch.starts_with(other) { (branch, other) } else { (other, branch) };
                return Err(ParseError(format!(
                    "the branch {} lies inside the branch {}",
                    inner.display(),
                    outer.display()
                )));
            }
        }
        if let Some(mount_point) = mount_point
            && branch.starts_with(mount_point)
            && branch != mount_point
        {
            return Err(ParseError(format!(
                "the branch {} lies inside the mount point {}",
                branch.display(),
                mount_point.display()
            )));
        }
    }
    Ok(())
}
