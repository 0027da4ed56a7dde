//! The columns of a table as data: each is a chain of steps from the source directory to the path that is measured.
//!
//! `mounted` turns the chain into mounts; nothing here touches the machine.

/// One step of a chain: how the path so far is shown at the next path.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Step {
    /// A symbolic link.
    Symlink,
    /// `mount --bind`.
    Bind,
    /// Debian's bindfs without options.
    Bindfs,
    /// `nacre mirror` with these extra arguments.
    Nacre(&'static [&'static str]),
}

impl Step {
    /// The program that the step runs, as found on the search path; `nacre` stands for the program under test.
    pub fn program(self) -> Option<&'static str> {
        match self {
            Self::Symlink | Self::Bind => None,
            Self::Bindfs => Some("bindfs"),
            Self::Nacre(_) => Some("nacre"),
        }
    }
}

/// One column.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Target {
    /// Name on the command line, in JSON and in the figures file.
    pub id: &'static str,
    /// Heading for people.
    pub title: &'static str,
    /// The target that its ratios refer to.
    pub baseline: &'static str,
    /// From the source outwards; empty for the source itself.
    pub steps: &'static [Step],
    /// Whether daemon and clients run as an ordinary user.
    pub as_user: bool,
    /// Whether tests that change files are left out.
    pub reads_only: bool,
    /// Whether the source itself is measured while the steps are mounted over it and have seen its directories: what
    /// the mount costs those who do not use it.
    pub from_outside: bool,
}

const PLAIN: Target = Target { id: "", title: "", baseline: "direct", steps: &[], as_user: false, reads_only: false, from_outside: false };

/// The columns of the table `mirror`.
pub static MIRROR_TARGETS: &[Target] = &[
    Target { id: "direct", title: "direct", ..PLAIN },
    Target { id: "symlink", title: "symlink", steps: &[Step::Symlink], ..PLAIN },
    Target { id: "bind", title: "bind mount", steps: &[Step::Bind], ..PLAIN },
    Target { id: "bindfs", title: "bindfs", steps: &[Step::Bindfs], ..PLAIN },
    Target { id: "bindfs-bindfs", title: "bindfs over bindfs", steps: &[Step::Bindfs, Step::Bindfs], ..PLAIN },
    Target { id: "bind-bindfs", title: "bind over bindfs", steps: &[Step::Bindfs, Step::Bind], ..PLAIN },
    Target { id: "nacre", title: "nacre", steps: &[Step::Nacre(&[])], ..PLAIN },
    Target { id: "nacre-nacre", title: "nacre over nacre", steps: &[Step::Nacre(&[]), Step::Nacre(&[])], ..PLAIN },
    Target { id: "bind-nacre", title: "bind over nacre", steps: &[Step::Nacre(&[]), Step::Bind], ..PLAIN },
    Target { id: "nacre-noacl", title: "nacre, no xattrs", steps: &[Step::Nacre(&["--acl=off", "--xattr=none"])], ..PLAIN },
    Target { id: "nacre-immutable", title: "nacre, immutable", steps: &[Step::Nacre(&["--immutable"])], reads_only: true, ..PLAIN },
    Target { id: "watched", title: "source under nacre", steps: &[Step::Nacre(&[])], from_outside: true, ..PLAIN },
    Target { id: "direct-user", title: "direct, as user", baseline: "direct-user", as_user: true, ..PLAIN },
    Target { id: "nacre-user", title: "nacre, as user", baseline: "direct-user", steps: &[Step::Nacre(&[])], as_user: true, ..PLAIN },
];
