//! `nacre metrics`: metrics of mounts in Prometheus' text format (exposition format 0.0.4). Pure,
//! except for the requests of [`gathered`] and the server of [`listen`].

pub mod gathered;
pub mod listen;
mod pools;

use nacre_daemon::report::{OperationReport, Report};
use std::fmt::Write;

/// A family of samples: name, kind, help, and the value of one mount.
type Family = (&'static str, &'static str, &'static str, fn(&Report) -> u64);

const FAMILIES: &[Family] = &[
    ("nacre_uptime_seconds", "gauge", "Time since the mount was made.", |report| report.uptime),
    ("nacre_passthrough", "gauge", "Whether the kernel serves data itself.", |report| u64::from(report.passthrough.on)),
    ("nacre_in_flight", "gauge", "Requests being answered.", |report| report.in_flight),
    ("nacre_inodes", "gauge", "Files that the kernel knows.", |report| report.inodes),
    ("nacre_open_files", "gauge", "Open files.", |report| report.open_files),
    ("nacre_passthrough_opens_total", "counter", "Opens that the kernel serves itself.", |report| {
        report.passthrough_opens
    }),
    ("nacre_cache_hits_total", "counter", "Opens answered without looking anything up again.", |report| {
        report.cache_hits
    }),
    ("nacre_invalidations_total", "counter", "Changes of the source that the kernel was told of.", |report| {
        report.invalidations
    }),
    ("nacre_full_invalidations_total", "counter", "Times that everything was invalidated.", |report| {
        report.full_invalidations
    }),
];

/// Returns the metrics of these mounts as Prometheus text.
pub fn text(reports: &[Report]) -> String {
    let mut text = String::new();
    for (name, kind, help, value) in FAMILIES {
        head(&mut text, name, kind, help);
        for report in reports {
            sample(&mut text, name, &mount(report), &value(report).to_string());
        }
    }
    head(&mut text, "nacre_mount_info", "gauge", "1, with the source of the mount: workspace:NAME for a workspace.");
    for report in reports {
        let labels = format!("{},source=\"{}\"", mount(report), escape(&report.source));
        sample(&mut text, "nacre_mount_info", &labels, "1");
    }
    operations(&mut text, reports, "nacre_requests_total", "Requests answered.", |operation| operation.requests);
    operations(
        &mut text,
        reports,
        "nacre_request_errors_total",
        "Requests that failed (missing names and extended attributes and ENOSYS are answers).",
        |operation| operation.errors,
    );
    durations(&mut text, reports);
    text
}

/// Writes the head of a metric family.
pub fn head(text: &mut String, name: &str, kind: &str, help: &str) {
    // Writing to a string cannot fail.
    let _ = write!(text, "# HELP {name} {help}\n# TYPE {name} {kind}\n");
}

/// Writes a sample.
pub fn sample(text: &mut String, name: &str, labels: &str, value: &str) {
    let _ = writeln!(text, "{name}{{{labels}}} {value}");
}

fn mount(report: &Report) -> String {
    format!("mountpoint=\"{}\"", escape(&report.mountpoint))
}

fn labels(report: &Report, operation: &OperationReport) -> String {
    format!("{},operation=\"{}\"", mount(report), escape(&operation.name))
}

fn operations(text: &mut String, reports: &[Report], name: &str, help: &str, value: fn(&OperationReport) -> u64) {
    head(text, name, "counter", help);
    for report in reports {
        for operation in &report.operations {
            sample(text, name, &labels(report, operation), &value(operation).to_string());
        }
    }
}

fn durations(text: &mut String, reports: &[Report]) {
    const NAME: &str = "nacre_request_duration_seconds";
    head(text, NAME, "histogram", "Time spent answering.");
    for report in reports {
        for operation in &report.operations {
            histogram(text, NAME, &labels(report, operation), &operation.latency, operation.total_ns);
        }
    }
}

/// Writes a histogram of times in nanoseconds. Each bucket has its upper bound and the number of
/// times above the bound before it; `sum` is the sum of all times.
fn histogram(text: &mut String, name: &str, labels: &str, buckets: &[(Option<u64>, u64)], sum: u64) {
    let (bucket, mut seen) = (format!("{name}_bucket"), 0_u64);
    for (bound, requests) in buckets {
        seen += requests;
        if let Some(bound) = bound {
            sample(text, &bucket, &format!("{labels},le=\"{}\"", fraction(*bound, 9)), &seen.to_string());
        }
    }
    sample(text, &bucket, &format!("{labels},le=\"+Inf\""), &seen.to_string());
    sample(text, &format!("{name}_sum"), labels, &fraction(sum, 9));
    sample(text, &format!("{name}_count"), labels, &seen.to_string());
}

/// Formats a number with this many digits after the point, exactly.
fn fraction(number: u64, digits: u32) -> String {
    let unit = 10_u64.saturating_pow(digits);
    format!("{}.{:0width$}", number / unit, number % unit, width = digits as usize)
}

/// Escapes the value of a label for its place between quotes.
pub fn escape(label: &str) -> String {
    label.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_sample_has_a_type_and_labels() {
        let operation = OperationReport {
            name: "lookup".to_owned(),
            requests: 5,
            errors: 1,
            total_ns: 1_500_000_000,
            latency: vec![(Some(1023), 3), (None, 2)],
        };
        let report = Report {
            mountpoint: "/a\"b\\".to_owned(),
            source: "workspace:w".to_owned(),
            operations: vec![operation],
            ..Report::default()
        };
        let text = text(&[report]);
        for line in [
            "nacre_requests_total{mountpoint=\"/a\\\"b\\\\\",operation=\"lookup\"} 5",
            "nacre_request_errors_total{mountpoint=\"/a\\\"b\\\\\",operation=\"lookup\"} 1",
            "nacre_request_duration_seconds_bucket{mountpoint=\"/a\\\"b\\\\\",operation=\"lookup\",le=\"0.000001023\"} 3",
            "nacre_request_duration_seconds_bucket{mountpoint=\"/a\\\"b\\\\\",operation=\"lookup\",le=\"+Inf\"} 5",
            "nacre_request_duration_seconds_sum{mountpoint=\"/a\\\"b\\\\\",operation=\"lookup\"} 1.500000000",
            "nacre_mount_info{mountpoint=\"/a\\\"b\\\\\",source=\"workspace:w\"} 1",
            "nacre_passthrough{mountpoint=\"/a\\\"b\\\\\"} 0",
        ] {
            assert!(text.lines().any(|found| found == line), "{line} in\n{text}");
        }
        let mut typed = Vec::new();
        for line in text.lines() {
            match line.strip_prefix("# TYPE ") {
                Some(rest) => typed.push(rest.split(' ').next().unwrap_or_default().to_owned()),
                None if line.starts_with('#') => {}
                None => assert!(typed.iter().any(|name| line.starts_with(name.as_str())), "{line}"),
            }
        }
    }
}
