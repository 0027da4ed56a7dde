//! The metrics of unions in `nacre metrics`. Pure.

use crate::metrics::{escape, head, sample};
use nacre_daemon::union::report::BranchReport;

/// A metric of a branch: its name, its help, and its value.
type Gauge = (&'static str, &'static str, fn(&BranchReport) -> Option<u64>);

const GAUGES: &[Gauge] = &[
    ("nacre_union_branch_size_bytes", "Bytes of the file system of a branch.", |branch| branch.size),
    ("nacre_union_branch_used_bytes", "Bytes in use there.", |branch| branch.used),
    ("nacre_union_branch_free_bytes", "Bytes that may be used still.", |branch| branch.free),
    ("nacre_union_branch_open_files", "Open files on the branch.", |branch| Some(branch.open_files)),
    ("nacre_union_branch_draining", "Whether it takes nothing new.", |branch| {
        Some(u64::from(branch.state == "draining"))
    }),
];

/// Returns the metrics of these branches as Prometheus text.
pub fn text(branches: &[BranchReport]) -> String {
    let mut text = String::new();
    if branches.is_empty() {
        return text;
    }
    for (name, help, value) in GAUGES {
        head(&mut text, name, "gauge", help);
        for branch in branches {
            if let Some(value) = value(branch) {
                let (mountpoint, path, mode) =
                    (escape(&branch.mountpoint), escape(&branch.branch), escape(&branch.mode));
                let labels = format!("mountpoint=\"{mountpoint}\",branch=\"{path}\",mode=\"{mode}\"");
                sample(&mut text, name, &labels, &value.to_string());
            }
        }
    }
    text
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_branch_has_its_figures() {
        let branch =
            BranchReport { branch: "/a".to_owned(), free: Some(5), mode: "rw".to_owned(), ..BranchReport::default() };
        let text = text(&[branch]);
        assert!(
            text.contains("nacre_union_branch_free_bytes{mountpoint=\"\",branch=\"/a\",mode=\"rw\"} 5\n"),
            "{text}"
        );
        // Unknown values have no sample.
        assert!(!text.contains("size_bytes{"));
        assert_eq!(super::text(&[]), "");
    }
}
