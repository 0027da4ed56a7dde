//! Reading a pool that is damaged: everything that can be read, errors where it cannot, and never
//! longer than a limit.
use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use nacre_pool::files::{FileError, Files, Inode, Table};
use nacre_pool::rows::FileType;

use super::Imported;

/// A trial that takes longer has no end. Far more than any needs.
const PATIENCE: Duration = Duration::from_secs(300);
/// Names, directories and bytes that a pool of the tests never has: beyond, a listing has no end or
/// a size is a lie.
const ENTRIES_MOST: usize = 100_000;
const SIZE_MOST: u64 = 64 << 20;

/// Ends the process when a trial does not end.
pub struct Watchdog(Arc<(AtomicU64, Mutex<String>)>);

impl Watchdog {
    /// Starts watching.
    pub fn start() -> Watchdog {
        let shared = Arc::new((AtomicU64::new(1), Mutex::new(String::new())));
        let watched = Arc::downgrade(&shared);
        std::thread::spawn(move || {
            let mut seen = (0, Instant::now());
            while let Some(shared) = watched.upgrade() {
                let now = shared.0.load(Ordering::Relaxed);
                if now != seen.0 {
                    seen = (now, Instant::now());
                }
                if seen.1.elapsed() > PATIENCE {
                    eprintln!("has no end: {}", shared.1.lock().unwrap());
                    std::process::abort();
                }
                drop(shared);
                std::thread::sleep(Duration::from_millis(200));
            }
        });
        Watchdog(shared)
    }

    /// A new trial begins.
    pub fn trial(&self, what: &str) {
        what.clone_into(&mut self.0.1.lock().unwrap());
        self.0.0.fetch_add(1, Ordering::Relaxed);
    }
}

/// What could be read of a dataset.
#[derive(Debug, Default)]
pub struct Readable {
    /// By path: the content, where it can be read.
    pub files: BTreeMap<String, Result<Vec<u8>, FileError>>,
    /// Why names may be missing.
    pub incomplete: Option<FileError>,
}

/// Reads a dataset as far as that goes.
pub fn read<T: Table>(files: &Files<T>) -> Readable {
    let mut readable = Readable::default();
    let mut waiting = vec![(String::new(), files.root())];
    let mut entries = 0;
    while let Some((path, directory)) = waiting.pop() {
        let mut behind = 0;
        loop {
            let listed = match files.list(&directory, behind, true, 50) {
                Ok(listed) => listed,
                Err(error) => {
                    readable.incomplete = Some(error);
                    break;
                }
            };
            let Some(last) = listed.last() else { break };
            entries += listed.len();
            if last.sequence <= behind || entries > ENTRIES_MOST {
                readable.incomplete = Some(FileError::Invalid);
                break;
            }
            behind = last.sequence;
            for entry in listed {
                let name = String::from_utf8_lossy(&entry.name).into_owned();
                let Some((inode, row)) = entry.file else {
                    readable.files.insert(format!("{path}{name}"), Err(FileError::NotFound));
                    continue;
                };
                // Whatever comes of it, it comes to an end.
                let _ = files.look_up(&directory, &entry.name);
                for name in files.attribute_names(&inode).unwrap_or_default() {
                    let _ = files.attribute(&inode, &name);
                }
                let _ = files.path(&inode);
                if row.file_type() == Some(FileType::Directory) && path.len() < 2000 {
                    waiting.push((format!("{path}{name}/"), inode));
                } else {
                    readable.files.insert(format!("{path}{name}"), content(files, &inode, row.size));
                }
            }
        }
    }
    readable
}

fn content<T: Table>(files: &Files<T>, inode: &Inode, size: u64) -> Result<Vec<u8>, FileError> {
    if size > SIZE_MOST {
        // As a reader of such a file would: its beginning and its end.
        files.read(inode, 0, &mut vec![0; 1 << 20])?;
        files.read(inode, size - 4096, &mut vec![0; 4096])?;
        return Err(FileError::TooLarge);
    }
    let mut content = vec![0; usize::try_from(size).unwrap()];
    let length = files.read(inode, 0, &mut content)?;
    content.truncate(length);
    Ok(content)
}

/// All datasets with their names; fewer where the catalog is damaged.
pub fn datasets(imported: &Imported) -> Vec<(u64, String)> {
    let look = imported.pool.catalog_view();
    let Ok(root) = look.root() else { return Vec::new() };
    let mut ids = vec![root];
    let mut at = 0;
    while at < ids.len() && ids.len() < 1000 {
        ids.extend(look.children(ids[at]).unwrap_or_default());
        at += 1;
    }
    ids.into_iter().filter_map(|id| Some((id, look.name(id).ok()?))).collect()
}
