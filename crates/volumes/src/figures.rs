//! Use and limits of volumes, from the JSON of `nacre cage` and `nacre fs`; as metrics of Prometheus.

use crate::{
    command::{Nacre, SHORT},
    dataset,
    failure::{Failure, Kind},
    mount_table::MountTable,
    options::Place,
    volumes::{Shown, Volumes},
};
use serde::Deserialize;
use serde_json::{Map, Value, json};
use std::{collections::BTreeMap, fmt::Write};

/// The figures of one volume; what is not known is missing.
#[derive(Clone, Debug, Default)]
pub struct Figures {
    /// Bytes in it.
    pub used: Option<u64>,
    /// The limit, bytes.
    pub limit: Option<u64>,
    /// Files, directories and links in it.
    pub inodes: Option<u64>,
    /// Their limit.
    pub inode_limit: Option<u64>,
}

/// A cage, as `nacre cage --json` has it.
#[derive(Deserialize)]
struct Cage {
    mountpoint: Option<String>,
    used: Option<u64>,
    inodes: Option<u64>,
}

/// File systems, as `nacre fs list --json` has them.
#[derive(Deserialize)]
struct Datasets {
    datasets: BTreeMap<String, DatasetRow>,
}

#[derive(Deserialize)]
struct DatasetRow {
    properties: BTreeMap<String, Property>,
}

#[derive(Deserialize)]
struct Property {
    value: Value,
}

impl DatasetRow {
    /// A number that is not zero: zero is no limit.
    fn number(&self, property: &str) -> Option<u64> {
        let value = &self.properties.get(property)?.value;
        let number = value.as_u64().or_else(|| value.as_str()?.parse().ok())?;
        (number > 0).then_some(number)
    }
}

impl Volumes {
    /// The figures of these volumes, in their order. Where a command fails, its figures are missing
    /// and the log says why.
    pub fn figures(&self, list: &[Shown]) -> Vec<Figures> {
        let is_cage = |volume: &Shown| matches!(volume.spec.place, Place::Directory { limit: Some(_) });
        let is_dataset = |volume: &Shown| matches!(volume.spec.place, Place::Dataset(_));
        let cages = if list.iter().any(is_cage) { logged(cages(&self.nacre)) } else { Vec::new() };
        let datasets = if list.iter().any(is_dataset) { logged(datasets(&self.nacre)) } else { BTreeMap::new() };
        list.iter().map(|volume| figures(volume, &cages, &datasets)).collect()
    }

    /// The status of one volume, as `docker volume inspect` shows it.
    pub fn status(&self, volume: &Shown) -> Map<String, Value> {
        let mut status = Map::new();
        let figures = self.figures(std::slice::from_ref(volume)).pop().unwrap_or_default();
        let numbers = [
            ("used", figures.used),
            ("limit", figures.limit),
            ("inodes", figures.inodes),
            ("inode-limit", figures.inode_limit),
        ];
        for (key, number) in numbers {
            if let Some(number) = number {
                status.insert(key.into(), number.into());
            }
        }
        status.insert("mounted-by".into(), volume.record.holders.len().into());
        if let Place::Dataset(dataset) = &volume.spec.place {
            let name = dataset::name(dataset, &volume.record.name);
            let words = ["fs", "list", "-H", "-o", "name", "-t", "snapshot", "--", &name];
            let snapshots = logged(self.nacre.done(None, &words));
            let names = String::from_utf8_lossy(&snapshots);
            let names: Vec<&str> = names.lines().filter_map(|line| Some(line.split_once('@')?.1)).collect();
            status.insert("file-system".into(), name.into());
            status.insert("snapshots".into(), json!(names));
        }
        if volume.record.backup.done > 0 {
            status.insert("backup".into(), volume.record.backup.done.into());
        }
        if let Some(failure) = &volume.record.backup.failure {
            status.insert("backup-failure".into(), failure.as_str().into());
        }
        status
    }

    /// One volume as the command `list --json` shows it.
    pub fn row(&self, volume: &Shown) -> Value {
        json!({
            "name": volume.record.name,
            "path": volume.at.to_string_lossy(),
            "created": volume.record.created,
            "options": volume.record.options,
            "holders": volume.record.holders,
            "status": self.status(volume),
        })
    }

    /// All volumes as text of Prometheus.
    ///
    /// # Errors
    /// The state directory cannot be read.
    pub fn metrics(&self) -> Result<String, Failure> {
        let list = self.list()?;
        let figures = self.figures(&list);
        let mounts = MountTable::read()?;
        let mut text = String::new();
        let mut family = |name: &str, help: &str, value: &dyn Fn(&Shown, &Figures) -> Option<u64>| {
            let _ = writeln!(text, "# HELP nacre_volume_{name} {help}\n# TYPE nacre_volume_{name} gauge");
            for (volume, figures) in list.iter().zip(&figures) {
                if let Some(value) = value(volume, figures) {
                    // Names have no letters that a label would escape.
                    let _ = writeln!(text, "nacre_volume_{name}{{volume=\"{}\"}} {value}", volume.record.name);
                }
            }
        };
        family("used_bytes", "Bytes in the volume.", &|_, figures| figures.used);
        family("limit_bytes", "Limit of the volume.", &|_, figures| figures.limit);
        family("inodes", "Files, directories and links in the volume.", &|_, figures| figures.inodes);
        family("inode_limit", "Limit of files, directories and links.", &|_, figures| figures.inode_limit);
        family("mounted", "Whether the volume is mounted.", &|volume, _| Some(mounts.count(&volume.at).min(1) as u64));
        family("holders", "Callers that have the volume mounted.", &|volume, _| {
            Some(volume.record.holders.len() as u64)
        });
        family("backup_timestamp_seconds", "Time of the last backup.", &|volume, _| {
            Some(volume.record.backup.done).filter(|done| *done > 0)
        });
        family("backup_failed", "Whether the last backup failed.", &|volume, _| {
            let backup = &volume.record.backup;
            if backup.tried > 0 { Some(u64::from(backup.failure.is_some())) } else { None }
        });
        Ok(text)
    }
}

fn figures(volume: &Shown, cages: &[Cage], datasets: &BTreeMap<String, DatasetRow>) -> Figures {
    match &volume.spec.place {
        Place::Directory { limit: None } => Figures::default(),
        Place::Directory { limit: Some(limit) } => {
            let at = volume.at.to_str();
            let cage = cages.iter().find(|cage| cage.mountpoint.as_deref() == at);
            Figures {
                used: cage.and_then(|cage| cage.used),
                limit: Some(limit.size),
                inodes: cage.and_then(|cage| cage.inodes),
                inode_limit: limit.files,
            }
        }
        Place::Dataset(dataset) => {
            let Some(row) = datasets.get(&dataset::name(dataset, &volume.record.name)) else {
                return Figures::default();
            };
            Figures {
                used: row.number("referenced"),
                limit: row.number("refquota").or_else(|| row.number("quota")),
                ..Figures::default()
            }
        }
    }
}

fn cages(nacre: &Nacre) -> Result<Vec<Cage>, Failure> {
    parsed(nacre, &["cage", "list", "--json"])
}

fn datasets(nacre: &Nacre) -> Result<BTreeMap<String, DatasetRow>, Failure> {
    let words = ["fs", "list", "-j", "--json-int", "-t", "filesystem", "-o", "name,referenced,refquota,quota"];
    let list: Datasets = parsed(nacre, &words)?;
    Ok(list.datasets)
}

fn parsed<T: for<'a> Deserialize<'a>>(nacre: &Nacre, words: &[&str]) -> Result<T, Failure> {
    // A process that does not answer makes an exit code of 1; the others' figures are there.
    let finished = nacre.run(None, words, SHORT)?;
    serde_json::from_slice(&finished.output).map_err(|error| {
        if finished.is_done() {
            Failure::new(Kind::Failed, format!("the output of nacre {} is not understood: {error}", words.join(" ")))
        } else {
            finished.failure()
        }
    })
}

fn logged<T: Default>(result: Result<T, Failure>) -> T {
    match result {
        Ok(value) => value,
        Err(failure) => {
            crate::log::line(&format!("figures: {failure}"));
            T::default()
        }
    }
}
