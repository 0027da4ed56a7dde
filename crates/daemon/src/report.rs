//! Report of a mount: the data of `status`, `top` and `metrics`, as sent over the control socket.
//!
//! Filled in by the process that serves the mount ([`crate::serve`]), shown by [`nacre_cli::status`],
//! [`nacre_cli::top`] and [`nacre_cli::metrics`]. The JSON form is an interface for scripts: fields are added,
//! never renamed.

use crate::{cage::report::CageReport, union::report::BranchReport};
use nacre_admin::pool::Survives;
use nacre_vfs::Description;
use serde::{Deserialize, Serialize};
use std::io::Write as _;
use std::{fmt, os::unix::ffi::OsStrExt, path::Path};

/// One layer of a stack and the layers below it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LayerReport {
    /// The layer's name.
    pub layer: String,
    /// Settings of the layer: key and value.
    pub settings: Vec<(String, String)>,
    /// The layers below.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub below: Vec<LayerReport>,
}

/// Number of nested layers that are listed one by one: JSON parsers limit the depth (serde_json to 128, two for
/// each layer).
const LAYERS_MAX: usize = 48;

impl From<Description> for LayerReport {
    /// Converts a description; the lower part of a very deep stack is left out, while [`Report::stack`] names all
    /// of it.
    fn from(description: Description) -> LayerReport {
        layers_within(description, LAYERS_MAX)
    }
}

fn layers_within(description: Description, most: usize) -> LayerReport {
    if most == 0 {
        return LayerReport { layer: "...".to_owned(), ..LayerReport::default() };
    }
    let below = description.below.into_iter().map(|below| layers_within(below, most - 1)).collect();
    LayerReport { layer: description.layer, settings: description.settings, below }
}

/// Statistics of one kind of request.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct OperationReport {
    /// Kind of request (`lookup`, `read`).
    pub name: String,
    /// Number of requests.
    pub requests: u64,
    /// Number of answers that were errors.
    pub errors: u64,
    /// Time spent answering, nanoseconds.
    pub total_ns: u64,
    /// Histogram of times: upper bound in nanoseconds (the last one has none) and number of requests in this
    /// interval, not cumulated.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub latency: Vec<(Option<u64>, u64)>,
}

/// Passthrough of file content.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PassthroughReport {
    /// The kernel reads and writes the source's files itself.
    pub on: bool,
    /// Why there is no passthrough.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub why_not: Option<String>,
}

/// A request of one of a mount's own threads to the mount itself that has waited too long.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct WaitingReport {
    /// Description of the system call or task.
    pub request: String,
    /// Thread id.
    pub thread: u32,
    /// Node id of the inode in the FUSE protocol.
    pub inode: u64,
    /// Waiting time in seconds.
    pub seconds: u64,
}

impl fmt::Display for WaitingReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let WaitingReport { request, thread, inode, seconds } = self;
        write!(f, "{request} of inode {inode} by thread {thread} for {seconds} s")
    }
}

/// Report of one mount.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Report {
    /// Mount point.
    pub mountpoint: String,
    /// Device number as in the mount table (`0:43`).
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub device: Option<String>,
    /// Source: the first column of the mount table.
    pub source: String,
    /// The process that serves it; 0 where the kernel alone does.
    pub pid: u32,
    /// User id of that process.
    pub uid: u32,
    /// Seconds since the mount was made.
    pub uptime: u64,
    /// `fuse` or `kernel`.
    pub engine: String,
    /// Reason for this engine.
    pub engine_reason: String,
    /// The stack in one line.
    pub stack: String,
    /// The stack as described by its layers.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub layers: Option<LayerReport>,
    /// The mount is detached: not visible at its mount point any more, and in use by open files or in other mount
    /// namespaces.
    #[serde(default)]
    pub detached: bool,
    /// The mount can never be made writable: a snapshot, `--immutable`, `--no-open`.
    #[serde(default)]
    pub stays_read_only: bool,
    /// Transport between kernel and daemon, in one word.
    pub transport: String,
    /// Why it is not io_uring, where that was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub transport_reason: Option<String>,
    /// Passthrough of file content.
    pub passthrough: PassthroughReport,
    /// Why opens need a request, where they do.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub asks_at_open: Option<String>,
    /// Which changes of the source by others are expected.
    pub coherence: String,
    /// Number of times that all caches were dropped: the watcher lost events, or rules were reloaded.
    pub full_invalidations: u64,
    /// Number of invalidations sent to the kernel.
    pub invalidations: u64,
    /// Number of requests.
    pub requests: u64,
    /// Number of answers that were errors.
    pub errors: u64,
    /// Number of requests being answered now.
    pub in_flight: u64,
    /// Unanswered requests of its own threads to itself.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub waiting: Vec<WaitingReport>,
    /// Number of inodes that the kernel knows.
    pub inodes: u64,
    /// Number of open files.
    pub open_files: u64,
    /// Number of opens with passthrough.
    pub passthrough_opens: u64,
    /// Number of opens that reused an open file of the source.
    pub cache_hits: u64,
    /// Statistics of the kinds of request that occurred.
    pub operations: Vec<OperationReport>,
    /// How it survives its process, where that was requested.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub survives: Option<Survives>,
    /// The cages in the stack, from the bottom up.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cages: Vec<CageReport>,
    /// The branches of its union, topmost first.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub branches: Vec<BranchReport>,
}

impl Report {
    /// The mount point, and the name of the workspace that is shown there.
    pub fn title(&self) -> String {
        match self.source.strip_prefix(crate::hooks::WORKSPACE_PREFIX) {
            Some(name) => format!("{} (workspace {name})", self.mountpoint),
            None => self.mountpoint.clone(),
        }
    }

    /// Returns the part that everybody may know who can see the mount: data of the mount table, and figures. Paths
    /// of other directories, rules and usage of users are left out.
    #[must_use]
    pub fn for_all(self) -> Report {
        let kinds = |layers: &LayerReport| {
            let (mut kinds, mut at) = (Vec::new(), Some(layers));
            while let Some(layer) = at {
                kinds.push(layer.layer.clone());
                at = layer.below.first();
            }
            kinds.reverse();
            kinds.join(" | ")
        };
        let cages = self.cages.into_iter().map(|cage| cage.for_all(&self.mountpoint)).collect();
        Report {
            stack: self.layers.as_ref().map(kinds).unwrap_or_default(),
            layers: None,
            engine_reason: String::new(),
            transport_reason: None,
            passthrough: PassthroughReport { on: self.passthrough.on, why_not: None },
            asks_at_open: None,
            cages,
            branches: Vec::new(),
            ..self
        }
    }

    /// Returns the time spent answering, in nanoseconds.
    pub fn total_ns(&self) -> u64 {
        self.operations.iter().fold(0, |sum, operation| sum.saturating_add(operation.total_ns))
    }
}

/// Formats a path as text that is the same everywhere and safe on a terminal: bytes that are no printable UTF-8 are
/// written `\xNN`.
pub fn path_text(path: &Path) -> String {
    printable(path.as_os_str().as_bytes())
}

/// Formats any bytes as printable text, like [`path_text`].
pub fn printable(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for chunk in bytes.utf8_chunks() {
        for character in chunk.valid().chars() {
            match character {
                '\\' => text.push_str("\\\\"),
                character if character.is_control() => {
                    let mut buffer = [0; 4];
                    character
                        .encode_utf8(&mut buffer)
                        .bytes()
                        .for_each(|byte| text.push_str(&format!("\\x{byte:02x}")));
                }
                character => text.push(character),
            }
        }
        chunk.invalid().iter().for_each(|byte| text.push_str(&format!("\\x{byte:02x}")));
    }
    text
}

/// Description of a detached mount.
pub const DETACHED: &str = "detached: in use by open files or in other mount namespaces";

/// Prints which mounts (mount point, detached or not, process) are detached.
pub fn tell_detached<'a>(mounts: impl Iterator<Item = (&'a String, bool, u32)>) {
    for (place, _, pid) in mounts.filter(|(_, detached, _)| *detached) {
        let place = printable(place.as_bytes());
        // A failure to print a warning is ignored.
        let _ = writeln!(
            std::io::stderr(),
            "nacre: the mount at {place} is {DETACHED}; `nacre umount {place}` or `kill {pid}` ends it"
        );
    }
}

/// Formats the layers from the top down, each indented below the one above.
pub fn tree(layer: &LayerReport, depth: usize) -> String {
    let settings: Vec<String> = layer.settings.iter().map(|(key, value)| setting(key, value)).collect();
    let mut text = format!("{}{} {}", "  ".repeat(depth), printable(layer.layer.as_bytes()), settings.join(" "));
    text.truncate(text.trim_end().len());
    text.push('\n');
    layer.below.iter().for_each(|below| text.push_str(&tree(below, depth + 1)));
    text
}

fn setting(key: &str, value: &str) -> String {
    let key = printable(key.as_bytes());
    if value.is_empty() { key } else { format!("{key}={}", printable(value.as_bytes())) }
}

/// Prints a note for the user.
pub fn tell(line: &str) {
    if !line.is_empty() {
        // A failure to print a note is ignored.
        let _ = writeln!(std::io::stderr(), "{line}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn paths_are_printable_and_distinct() {
        for (bytes, text) in [
            (&b"/a b"[..], "/a b"),
            ("/\u{fc}".as_bytes(), "/\u{fc}"),
            (b"/\xff\n", "/\\xff\\x0a"),
            (b"/\\xff", "/\\\\xff"),
            (b"/\x1b[31m", "/\\x1b[31m"),
        ] {
            assert_eq!(printable(bytes), text);
        }
    }

    #[test]
    fn a_report_of_any_number_of_layers_can_be_read_back() {
        let mut stack = Description::new("host");
        for _ in 0..1000 {
            let mut layer = Description::new("remap");
            layer.below.push(stack);
            stack = layer;
        }
        let report = Report { layers: Some(LayerReport::from(stack)), ..Report::default() };
        // As deep as it is sent: within an answer.
        let text = serde_json::to_vec(&[Some([&report])]).unwrap();
        let [Some([read])] = serde_json::from_slice::<[Option<[Report; 1]>; 1]>(&text).unwrap() else {
            panic!("one report")
        };
        assert_eq!(read, report);
        let mut layer = read.layers.unwrap();
        for _ in 0..LAYERS_MAX {
            assert_eq!(layer.layer, "remap");
            layer = layer.below.remove(0);
        }
        assert_eq!(layer.layer, "...");
    }

    #[test]
    fn not_everybody_hears_of_other_places() {
        let host = LayerReport {
            layer: "host".to_owned(),
            settings: vec![("source".to_owned(), "/secret".to_owned())],
            below: vec![],
        };
        let layers = LayerReport {
            layer: "remap".to_owned(),
            settings: vec![("hide".to_owned(), "/secret".to_owned())],
            below: vec![host],
        };
        let cage = CageReport {
            directory: "/secret".to_owned(),
            mountpoint: "/m".to_owned(),
            used: 7,
            ..CageReport::default()
        };
        let report = Report {
            mountpoint: "/m".to_owned(),
            stack: "host:/secret | remap:hide=/secret".to_owned(),
            layers: Some(layers),
            transport_reason: Some("/secret".to_owned()),
            engine_reason: "/secret".to_owned(),
            cages: vec![cage],
            branches: vec![BranchReport { branch: "/secret".to_owned(), ..BranchReport::default() }],
            requests: 5,
            ..Report::default()
        };
        let told = report.for_all();
        assert!(!serde_json::to_string(&told).unwrap().contains("secret"), "{told:?}");
        assert_eq!((told.stack.as_str(), told.requests, told.cages[0].used), ("host | remap", 5, 7));
    }

    #[test]
    fn layers_are_indented() {
        let host = LayerReport {
            layer: "host".to_owned(),
            settings: vec![("source".to_owned(), "/s".to_owned())],
            below: vec![],
        };
        let remap = LayerReport {
            layer: "remap".to_owned(),
            settings: vec![("delete-deny".to_owned(), String::new())],
            below: vec![host],
        };
        assert_eq!(tree(&remap, 1), "  remap delete-deny\n    host source=/s\n");
    }
}
