//! The metrics of cages in `nacre metrics`. Pure.

use crate::metrics::{escape, head, sample};
use nacre_daemon::cage::report::CageReport;

/// A metric of a cage: its name, its help, and its value, `None` for cages without it.
type Gauge = (&'static str, &'static str, fn(&CageReport) -> Option<u64>);

const GAUGES: &[Gauge] = &[
    ("nacre_cage_attached", "Whether the limit is in force.", |cage| Some(u64::from(cage.attached))),
    ("nacre_cage_limit_bytes", "Bytes that the cage may hold.", |cage| cage.limit),
    ("nacre_cage_used_bytes", "Bytes that the cage holds.", |cage| Some(cage.used)),
    ("nacre_cage_free_bytes", "Bytes that still fit.", |cage| Some(cage.free)),
    ("nacre_cage_soft_bytes", "The threshold that is reported.", |cage| cage.soft),
    ("nacre_cage_inode_limit", "Inodes that the cage may hold.", |cage| cage.inode_limit),
    ("nacre_cage_inodes", "Inodes that the cage holds.", |cage| cage.inodes),
    ("nacre_cage_exact", "Whether the figures are right to the byte.", |cage| {
        Some(u64::from(cage.accounting.starts_with("exact")))
    }),
];

/// Returns the metrics of these cages as Prometheus text.
pub fn text(cages: &[CageReport]) -> String {
    let mut text = String::new();
    if cages.is_empty() {
        return text;
    }
    for (name, help, value) in GAUGES {
        head(&mut text, name, "gauge", help);
        for cage in cages {
            if let Some(value) = value(cage) {
                sample(&mut text, name, &labels(cage), &value.to_string());
            }
        }
    }
    refused(&mut text, cages);
    counter(&mut text, cages, "nacre_cage_dropped_bytes_total", "Bytes deleted to make room.", |cage| {
        cage.dropped.bytes
    });
    counter(&mut text, cages, "nacre_cage_dropped_files_total", "Files deleted to make room.", |cage| {
        cage.dropped.files
    });
    let recalls = |cage: &CageReport| cage.collecting.as_ref().map_or(0, |collecting| collecting.recalls);
    counter(
        &mut text,
        cages,
        "nacre_cage_recalls_total",
        "Times that the kernel was told to ask before each append.",
        recalls,
    );
    parts(&mut text, cages);
    text
}

fn labels(cage: &CageReport) -> String {
    format!(
        "directory=\"{}\",mountpoint=\"{}\",engine=\"{}\"",
        escape(&cage.directory),
        escape(&cage.mountpoint),
        escape(&cage.engine)
    )
}

fn counter(text: &mut String, cages: &[CageReport], name: &str, help: &str, value: fn(&CageReport) -> u64) {
    head(text, name, "counter", help);
    cages.iter().for_each(|cage| sample(text, name, &labels(cage), &value(cage).to_string()));
}

fn refused(text: &mut String, cages: &[CageReport]) {
    const NAME: &str = "nacre_cage_refused_total";
    head(text, NAME, "counter", "Operations that did not fit.");
    for cage in cages {
        let refused = cage.refused;
        for (limit, value) in [
            ("size", refused.size),
            ("inodes", refused.inodes),
            ("user", refused.user),
            ("directory", refused.directory),
        ] {
            sample(text, NAME, &format!("{},limit=\"{limit}\"", labels(cage)), &value.to_string());
        }
    }
}

/// Appends the metrics of the limits of users and directories.
fn parts(text: &mut String, cages: &[CageReport]) {
    const USED: &str = "nacre_cage_part_used_bytes";
    const LIMIT: &str = "nacre_cage_part_limit_bytes";
    let parts = |cage: &CageReport| {
        let users = cage.users.iter().map(|user| (format!("user=\"{}\"", escape(&user.user)), user.used, user.limit));
        let groups = cage
            .directories
            .iter()
            .map(|part| (format!("part=\"{}\"", escape(&part.path)), part.used, Some(part.limit)));
        users.chain(groups).collect::<Vec<_>>()
    };
    head(text, USED, "gauge", "Bytes of the users who use most, and of directories with a limit.");
    for cage in cages {
        parts(cage)
            .iter()
            .for_each(|(label, used, _)| sample(text, USED, &format!("{},{label}", labels(cage)), &used.to_string()));
    }
    head(text, LIMIT, "gauge", "Bytes that users and directories may hold.");
    for cage in cages {
        for (label, _, limit) in parts(cage) {
            if let Some(limit) = limit {
                sample(text, LIMIT, &format!("{},{label}", labels(cage)), &limit.to_string());
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use nacre_daemon::cage::report::{DirectoryReport, RefusedReport, UserReport};

    #[test]
    fn each_sample_has_a_type_and_labels() {
        let cage = CageReport {
            directory: "/a\"b".to_owned(),
            mountpoint: "/m".to_owned(),
            engine: "fuse".to_owned(),
            limit: Some(4096),
            used: 5,
            accounting: "exact, being checked".to_owned(),
            refused: RefusedReport { user: 7, ..RefusedReport::default() },
            users: vec![UserReport { user: "bob".to_owned(), uid: 1, used: 3, limit: None }],
            directories: vec![DirectoryReport { path: "d".to_owned(), used: 1, limit: 2 }],
            ..CageReport::default()
        };
        let text = text(&[cage]);
        let labels = "directory=\"/a\\\"b\",mountpoint=\"/m\",engine=\"fuse\"";
        for line in [
            format!("nacre_cage_limit_bytes{{{labels}}} 4096"),
            format!("nacre_cage_used_bytes{{{labels}}} 5"),
            format!("nacre_cage_exact{{{labels}}} 1"),
            format!("nacre_cage_refused_total{{{labels},limit=\"user\"}} 7"),
            format!("nacre_cage_part_used_bytes{{{labels},user=\"bob\"}} 3"),
            format!("nacre_cage_part_limit_bytes{{{labels},part=\"d\"}} 2"),
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        assert!(
            !text.contains("nacre_cage_inode_limit{")
                && !text.contains("part_limit_bytes{directory=\"/a\\\"b\",mountpoint=\"/m\",engine=\"fuse\",user")
        );
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            let name = line.split('{').next().unwrap_or_default();
            assert!(text.contains(&format!("# TYPE {name} ")), "{line}");
        }
        assert_eq!(super::text(&[]), "");
    }
}
