//! The edge between trees and the store: frames are read and written through [`Frames`], so that a
//! tree is tested over a map in memory.

use std::sync::Arc;

use crate::error::{Damage, PoolError};
use crate::pointer::{ChecksumKind, FrameKind, Pointer, Txg};

/// Which open segment a frame goes to: frames that die together lie together (see "cleaning" in
/// `docs/pool-format.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum WriteStream {
    /// Nodes of trees, large values.
    Metadata = 1,
    /// File content as users write it.
    Data = 2,
    /// What the cleaner has moved: "survivors" in `docs/pool-format.md`.
    Relocated = 3,
    /// The segment table; its segments are named by root records, not by the table.
    Table = 4,
    /// What the cleaner has moved of trees, where metadata is written twice.
    RelocatedMetadata = 5,
}

impl WriteStream {
    /// Whether its segments hold frames that bear the names of other segments.
    #[must_use]
    pub fn is_of_moved(self) -> bool {
        matches!(self, Self::Relocated | Self::RelocatedMetadata)
    }

    /// Whether it is written twice in pools that have metadata twice.
    #[must_use]
    pub fn is_metadata(self) -> bool {
        matches!(self, Self::Metadata | Self::RelocatedMetadata | Self::Table)
    }
}

/// Whose frame it is, written into the frame's header: a scrub names the damaged file without a
/// walk of any tree, and a lost tree can be salvaged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// The dataset; 0 is the catalog.
    pub dataset: u64,
    /// The inode of file content; 0 for a tree's nodes.
    pub object: u64,
    /// The offset of file content, bytes; the height of a tree's node.
    pub offset: u64,
}

/// How content is to be compressed; a frame keeps content as it is where compression does not save
/// an eighth of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompressionSetting {
    /// As it is.
    Off,
    /// LZ4, or zstd's Huffman coding alone where that makes less of it: decided by the content.
    On,
    /// LZ4.
    Lz4,
    /// zstd at a level of 1 to 19, or -1 to -7 for the fast ones.
    Zstd(i8),
}

/// What is to be written.
#[derive(Clone, Copy, Debug)]
pub struct NewFrame<'a> {
    /// Which open segment it goes to.
    pub stream: WriteStream,
    /// What it holds.
    pub kind: FrameKind,
    /// Whose it is.
    pub owner: Owner,
    /// The txg that it belongs to.
    pub birth: Txg,
    /// Its content, 1 byte to 16 MiB.
    pub content: &'a [u8],
    /// How to compress it.
    pub compression: CompressionSetting,
    /// How to check it.
    pub checksum: ChecksumKind,
}

/// A frame that was checked and compressed, and has everything but a place and a txg.
#[derive(Debug)]
pub struct Compressed {
    pub(crate) pointer: Pointer,
    /// What is stored, where that is not the content.
    pub(crate) stored: Option<Vec<u8>>,
}

/// A frame that is read to a given place.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// Which.
    pub pointer: Pointer,
    /// Where its content goes.
    pub target: &'a mut [u8],
}

/// How far ahead of whoever reads from front to back it is worth asking, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// So far at once.
    pub least: u64,
    /// So far at once where a file is read from its front; and twice as far more as was read already.
    pub begins: u64,
    /// So far at most: asking may cost something.
    pub most: u64,
    /// What is asked for together costs little more than a part of it, where it lies in one such block of a
    /// segment; 0 where that makes no difference.
    pub block: u64,
}

impl Reach {
    /// Not at all.
    pub const NONE: Self = Self { least: 0, begins: 0, most: 0, block: 0 };
    /// Ahead of readers of devices: what is asked for in vain costs little.
    pub const OF_DEVICES: Self = Self { least: 8 << 20, most: 8 << 20, ..Self::NONE };
}

/// Frames by their pointers.
pub trait Frames: Send + Sync {
    /// The content of a frame, decompressed and checked. Frames that were written but not committed
    /// yet are read as well.
    ///
    /// # Errors
    /// [`PoolError::Frame`] for a damaged one, [`PoolError::Device`].
    fn read(&self, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError>;

    /// Reads the content of several frames to where it is wanted, each target as long as its
    /// frame's content. For streams: what was not kept in memory before is not kept afterwards.
    ///
    /// # Errors
    /// As [`Self::read`]; what the targets hold then is undefined.
    fn read_all(&self, wanted: &mut [Wanted<'_>]) -> Result<(), PoolError> {
        wanted.iter_mut().try_for_each(|Wanted { pointer, target }| {
            let content = self.read(pointer)?;
            if content.len() == target.len() {
                target.copy_from_slice(&content);
                return Ok(());
            }
            Err(PoolError::Frame {
                pointer: *pointer,
                damage: Damage::Structure("a frame of another length than expected"),
            })
        })
    }

    /// A frame as it is stored, checked; `None` where it is stored as its content is, or that cannot
    /// be had.
    ///
    /// # Errors
    /// As [`Self::read`].
    fn read_stored(&self, pointer: &Pointer) -> Result<Option<Vec<u8>>, PoolError> {
        let _ = pointer;
        Ok(None)
    }

    /// Tells that frames will be read soon, in this order. Never fails: it is a hint.
    fn expect(&self, pointers: &[Pointer]);

    /// The same where it is not urgent: the caller does not wait for the requests to be made. What comes
    /// `beyond` will be told later, and may be asked for already where it lies in the same block
    /// ([`Reach::block`]).
    fn expect_later(&self, pointers: &[Pointer], beyond: &[Pointer]) {
        let _ = beyond;
        self.expect(pointers);
    }

    /// How far ahead of a reader that is worth doing.
    fn ahead(&self) -> Reach {
        Reach::OF_DEVICES
    }

    /// Waits while what was written before goes on its way more slowly than it comes. Not under any
    /// lock, and not with a txg held open.
    fn await_room(&self) {}

    /// Writes a frame; it is durable once its txg is committed.
    ///
    /// # Errors
    /// [`PoolError::NoSpace`], [`PoolError::Device`], [`PoolError::Suspended`].
    fn write(&self, frame: &NewFrame<'_>) -> Result<Pointer, PoolError>;

    /// Writes several frames, one behind the other; compresses them by several threads where that
    /// pays. `written` gets the pointers of those that were written, in their order: all of them,
    /// or those before the one that failed.
    ///
    /// # Errors
    /// As [`Self::write`].
    fn write_all(&self, frames: &[NewFrame<'_>], written: &mut Vec<Pointer>) -> Result<(), PoolError> {
        frames.iter().try_for_each(|frame| {
            written.push(self.write(frame)?);
            Ok(())
        })
    }

    /// Compresses frames before they are written, by several threads where that pays; takes nothing
    /// of the pool, and the frames' txg does not count yet. Empty where that cannot be done apart.
    ///
    /// # Errors
    /// As [`Self::write`].
    fn compress_all(&self, frames: &[NewFrame<'_>]) -> Result<Vec<Compressed>, PoolError> {
        let _ = frames;
        Ok(Vec::new())
    }

    /// As [`Self::write`], with what [`Self::compress_all`] made of a frame of the same content,
    /// compression and checksum.
    ///
    /// # Errors
    /// As [`Self::write`].
    fn write_compressed(&self, frame: &NewFrame<'_>, compressed: &Compressed) -> Result<Pointer, PoolError> {
        let _ = compressed;
        self.write(frame)
    }
}
