//! A strict reader of Prometheus' text format (exposition format 0.0.4), for tests.
//!
//! It refuses input that promtool or Prometheus would refuse, and likely mistakes of nacre: samples
//! without a type, families in two places, the same series twice, histograms that decrease or whose
//! sums are missing.

use std::collections::{BTreeMap, BTreeSet};

/// Labels in order: name and value.
pub type Labels = Vec<(String, String)>;

/// A sample: its name, its labels in order, its value.
#[derive(Clone, Debug, PartialEq)]
pub struct Sample {
    pub name: String,
    pub labels: Labels,
    pub value: f64,
}

impl Sample {
    pub fn label(&self, name: &str) -> Option<&str> {
        self.labels.iter().find(|(label, _)| label == name).map(|(_, value)| value.as_str())
    }
}

/// Everything in a text.
#[derive(Debug, Default)]
pub struct Exposition {
    pub kinds: BTreeMap<String, String>,
    pub samples: Vec<Sample>,
}

impl Exposition {
    /// The value of the only sample with this name and these labels among its own.
    pub fn value(&self, name: &str, labels: &[(&str, &str)]) -> Option<f64> {
        let fits = |sample: &&Sample| {
            sample.name == name && labels.iter().all(|(label, value)| sample.label(label) == Some(value))
        };
        let mut found = self.samples.iter().filter(fits);
        let first = found.next()?;
        assert!(found.next().is_none(), "several {name} {labels:?}");
        Some(first.value)
    }

    /// Names of series as queries write them.
    pub fn series(&self) -> BTreeSet<&str> {
        self.samples.iter().map(|sample| sample.name.as_str()).collect()
    }
}

fn is_name(text: &str) -> bool {
    let start = |letter: char| letter.is_ascii_alphabetic() || letter == '_';
    text.starts_with(start) && text.chars().all(|letter| start(letter) || letter.is_ascii_digit())
}

/// Parses the labels of a sample from after the opening brace; returns the text after the closing
/// one, too.
fn labels(mut rest: &str) -> Result<(Labels, &str), String> {
    let mut found: Labels = Vec::new();
    loop {
        let (name, after) = rest.split_once("=\"").ok_or("a label without a value")?;
        if !is_name(name) || found.iter().any(|(known, _)| known == name) {
            return Err(format!("label {name:?}"));
        }
        let (mut value, mut letters) = (String::new(), after.char_indices());
        let end = loop {
            match letters.next().ok_or("a label without an end")? {
                (at, '"') => break at + 1,
                (_, '\\') => match letters.next() {
                    Some((_, 'n')) => value.push('\n'),
                    Some((_, letter @ ('\\' | '"'))) => value.push(letter),
                    other => return Err(format!("escaped {other:?}")),
                },
                (_, letter) => value.push(letter),
            }
        };
        found.push((name.to_owned(), value));
        rest = &after[end..];
        match rest.split_at_checked(1).ok_or("no end of labels")? {
            (",", more) => rest = more,
            ("}", more) => return Ok((found, more)),
            (other, _) => return Err(format!("{other:?} after a label")),
        }
    }
}

fn sample(line: &str) -> Result<Sample, String> {
    let end = line.find(['{', ' ']).ok_or("no value")?;
    let (name, rest) = line.split_at(end);
    let (labels, rest) = match rest.strip_prefix('{') {
        Some(rest) => labels(rest)?,
        None => (Vec::new(), rest),
    };
    let value = rest.strip_prefix(' ').ok_or("no blank before the value")?;
    if !is_name(name) || value.contains(' ') {
        return Err("more or less than a name and a value".to_owned());
    }
    let value = value.parse().map_err(|_| format!("value {value:?}"))?;
    Ok(Sample { name: name.to_owned(), labels, value })
}

/// The family of a sample, by the kinds that are known.
fn family(name: &str, kinds: &BTreeMap<String, String>) -> Option<String> {
    let of_histogram = ["_bucket", "_sum", "_count"]
        .iter()
        .find_map(|end| name.strip_suffix(end).filter(|base| kinds.get(*base).is_some_and(|kind| kind == "histogram")));
    of_histogram.or_else(|| kinds.get(name).filter(|kind| *kind != "histogram").map(|_| name)).map(str::to_owned)
}

/// Reads a text.
///
/// # Panics
/// At the first thing that is wrong.
pub fn read(text: &str) -> Exposition {
    assert!(text.is_empty() || text.ends_with('\n'), "the last line has no end");
    let mut all = Exposition::default();
    let (mut current, mut seen) = (String::new(), BTreeSet::new());
    for line in text.lines() {
        let fail = |why: &str| -> ! { panic!("{why}: {line}") };
        if let Some(rest) = line.strip_prefix("# HELP ") {
            let Some((name, help)) = rest.split_once(' ') else { fail("no help") };
            assert!(is_name(name) && !help.is_empty() && !all.kinds.contains_key(name), "{line}");
            current = name.to_owned();
        } else if let Some(rest) = line.strip_prefix("# TYPE ") {
            let Some((name, kind)) = rest.split_once(' ') else { fail("no type") };
            assert!(name == current, "the type of something else: {line}");
            assert!(["gauge", "counter", "histogram"].contains(&kind), "{line}");
            assert!(kind != "counter" || name.ends_with("_total"), "{line}");
            assert!(kind == "counter" || !name.ends_with("_total"), "{line}");
            assert!(all.kinds.insert(name.to_owned(), kind.to_owned()).is_none(), "a second type: {line}");
        } else {
            assert!(!line.starts_with('#') && !line.is_empty(), "{line:?}");
            let sample = sample(line).unwrap_or_else(|why| fail(&why));
            assert_eq!(family(&sample.name, &all.kinds).as_ref(), Some(&current), "out of its family: {line}");
            let mut labels = sample.labels.clone();
            labels.sort();
            assert!(seen.insert((sample.name.clone(), labels)), "twice: {line}");
            all.samples.push(sample);
        }
    }
    histograms(&all);
    all
}

fn histograms(all: &Exposition) {
    for name in all.kinds.iter().filter(|(_, kind)| *kind == "histogram").map(|(name, _)| name) {
        let mut buckets: BTreeMap<Labels, Vec<(f64, f64)>> = BTreeMap::new();
        for sample in all.samples.iter().filter(|sample| sample.name == format!("{name}_bucket")) {
            let bound = sample.label("le").unwrap_or_else(|| panic!("{sample:?} has no bound"));
            let bound = if bound == "+Inf" { f64::INFINITY } else { bound.parse().unwrap() };
            let rest = sample.labels.iter().filter(|(label, _)| label != "le").cloned().collect();
            buckets.entry(rest).or_default().push((bound, sample.value));
        }
        for (labels, buckets) in buckets {
            assert!(buckets.is_sorted_by(|a, b| a.0 < b.0 && a.1 <= b.1), "{name} {labels:?} goes down: {buckets:?}");
            let (bound, most) = *buckets.last().unwrap();
            let of = |end: &str| {
                let wanted = format!("{name}_{end}");
                all.samples.iter().find(|sample| sample.name == wanted && sample.labels == labels)
            };
            assert!(bound.is_infinite() && of("sum").is_some(), "{name} {labels:?}");
            assert_eq!(of("count").map(|sample| sample.value), Some(most), "{name} {labels:?}");
        }
    }
}
