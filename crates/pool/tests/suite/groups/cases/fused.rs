//! Devices that lose power at the same moment, in the middle of anything.
//!
//! Used by the model of groups, and by the test of changes of what a pool consists of. Invariant: after
//! the fuse has blown nothing is written, and what was written before is as the devices have it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use nacre_pool::device::{Device, Simulator};

/// All devices lose power at the same moment: after so many more writes and syncs.
#[derive(Clone)]
pub struct Fuse(Arc<AtomicU64>);

impl Default for Fuse {
    fn default() -> Self {
        Self(Arc::new(AtomicU64::new(u64::MAX)))
    }
}

impl Fuse {
    /// It blows after so many operations from now on.
    pub fn set(&self, operations: u64) {
        self.0.store(operations, Ordering::SeqCst);
    }

    /// It does not blow.
    pub fn mend(&self) {
        self.set(u64::MAX);
    }

    /// Whether it is going to blow.
    pub fn is_set(&self) -> bool {
        self.0.load(Ordering::SeqCst) != u64::MAX
    }

    pub fn is_blown(&self) -> bool {
        self.0.load(Ordering::SeqCst) == 0
    }

    /// The device on this fuse.
    pub fn on(&self, device: &Arc<Simulator>) -> Arc<dyn Device> {
        Arc::new(Fused { device: Arc::clone(device), fuse: self.clone() })
    }
}

/// A device on a fuse.
struct Fused {
    device: Arc<Simulator>,
    fuse: Fuse,
}

impl Fused {
    fn operation(&self) -> std::io::Result<()> {
        let left = self.fuse.0.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |left| left.checked_sub(1));
        left.map(drop).map_err(|_| std::io::Error::from_raw_os_error(5))
    }
}

impl Device for Fused {
    fn name(&self) -> &str {
        self.device.name()
    }

    fn length(&self) -> u64 {
        self.device.length()
    }

    fn read_at(&self, buffer: &mut [u8], offset: u64) -> std::io::Result<()> {
        self.device.read_at(buffer, offset)
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> std::io::Result<()> {
        self.operation()?;
        self.device.write_at(bytes, offset)
    }

    fn sync(&self) -> std::io::Result<()> {
        self.operation()?;
        self.device.sync()
    }

    fn discard(&self, offset: u64, length: u64) -> std::io::Result<()> {
        self.device.discard(offset, length)
    }

    fn expect(&self, _offset: u64, _length: u64) {}
}
