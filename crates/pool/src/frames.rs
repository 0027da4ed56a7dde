//! The interface between trees and the store: frames are read and written through [`Frames`], so that a tree can be
//! tested over a map in memory.

use std::sync::Arc;

use crate::error::{Damage, PoolError};
use crate::frame::Sealer;
use crate::pointer::{ChecksumKind, FrameKind, Pointer, Txg};

/// Stream of a write, which selects the open segment: frames with similar lifetimes share segments (see "cleaning" in
/// `docs/pool-format.md`).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[repr(u8)]
pub enum WriteStream {
    /// Tree nodes, large values.
    Metadata = 1,
    /// File content written by users.
    Data = 2,
    /// Frames moved by the cleaner: "survivors" in `docs/pool-format.md`.
    Relocated = 3,
    /// The segment table; its segments are named by root records, not by the table.
    Table = 4,
    /// Tree frames moved by the cleaner, where metadata is written twice.
    RelocatedMetadata = 5,
}

impl WriteStream {
    /// Whether its segments hold frames with names of other segments.
    #[must_use]
    pub fn is_of_moved(self) -> bool {
        matches!(self, Self::Relocated | Self::RelocatedMetadata)
    }

    /// Whether it is written twice in pools with redundant metadata.
    #[must_use]
    pub fn is_metadata(self) -> bool {
        matches!(self, Self::Metadata | Self::RelocatedMetadata | Self::Table)
    }
}

/// Owner of a frame, stored in the frame's header: a scrub names the damaged file without walking a tree, and a lost
/// tree can be salvaged.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Owner {
    /// The dataset; 0 is the catalog.
    pub dataset: u64,
    /// The inode of file content; 0 for a tree's nodes.
    pub object: u64,
    /// The offset of file content, bytes; the height of a tree's node.
    pub offset: u64,
}

/// Compression of content; content is stored uncompressed where compression saves less than an eighth.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CompressionSetting {
    /// No compression.
    Off,
    /// LZ4, or zstd's Huffman coding alone where that compresses better: decided by the content.
    On,
    /// LZ4.
    Lz4,
    /// zstd at a level of 1 to 19, or -1 to -7 for the fast ones.
    Zstd(i8),
}

/// A frame to be written.
#[derive(Clone, Copy, Debug)]
pub struct NewFrame<'a> {
    /// The stream, which selects the open segment.
    pub stream: WriteStream,
    /// The kind of its content.
    pub kind: FrameKind,
    /// The frame's owner.
    pub owner: Owner,
    /// The txg that the frame belongs to.
    pub birth: Txg,
    /// The frame's content, 1 byte to 16 MiB.
    pub content: &'a [u8],
    /// How to compress the content.
    pub compression: CompressionSetting,
    /// The checksum function.
    pub checksum: ChecksumKind,
}

/// A checked and compressed frame that has no location and no txg yet.
#[derive(Debug)]
pub struct Compressed {
    pub(crate) pointer: Pointer,
    /// The compressed bytes; `None` where the content is stored uncompressed.
    pub(crate) stored: Option<Vec<u8>>,
    /// The fields of a sealed frame's header; `None` for other frames.
    pub(crate) sealed: Option<SealedHeader>,
}

/// Fields of a sealed frame's header, which has the masked owner instead of the one in [`NewFrame`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct SealedHeader {
    pub(crate) sealer: Sealer,
    /// The masked inode.
    pub(crate) object: u64,
    /// The masked offset.
    pub(crate) offset: u64,
}

/// A request to read a frame into a buffer.
#[derive(Debug)]
pub struct Wanted<'a> {
    /// The frame.
    pub pointer: Pointer,
    /// The buffer.
    pub target: &'a mut [u8],
}

/// Readahead distances for sequential readers, bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Reach {
    /// Minimum readahead.
    pub least: u64,
    /// Readahead at the start of a file; it grows by twice the length that was read already.
    pub begins: u64,
    /// Maximum readahead: requests may cost something.
    pub most: u64,
    /// Block size: requesting a whole block of a segment costs little more than a part of it; 0 where that makes no
    /// difference.
    pub block: u64,
}

impl Reach {
    /// No readahead.
    pub const NONE: Self = Self { least: 0, begins: 0, most: 0, block: 0 };
    /// Readahead on devices: unnecessary requests cost little.
    pub const OF_DEVICES: Self = Self { least: 8 << 20, most: 8 << 20, ..Self::NONE };
}

/// Read and write access to frames.
pub trait Frames: Send + Sync {
    /// Reads, decompresses and verifies a frame. Written but uncommitted frames are readable as well.
    ///
    /// # Errors
    /// [`PoolError::Frame`] for a damaged frame, [`PoolError::Device`].
    fn read(&self, pointer: &Pointer) -> Result<Arc<[u8]>, PoolError>;

    /// Reads a frame as [`Self::read`], from the copy whose bytes `is_right` accepts, and repairs the others from it:
    /// after the bytes that [`Self::read`] returned have turned out to be forged, although their checksum is right.
    ///
    /// # Errors
    /// As [`Self::read`]; [`Damage::Seal`] where no copy is accepted.
    fn read_accepted(
        &self,
        pointer: &Pointer,
        is_right: &mut dyn FnMut(&[u8]) -> bool,
    ) -> Result<Arc<[u8]>, PoolError> {
        let content = self.read(pointer)?;
        if is_right(&content) { Ok(content) } else { Err(PoolError::Frame { pointer: *pointer, damage: Damage::Seal }) }
    }

    /// Reads several frames into their buffers, each as long as its frame's content. For streams: frames are not
    /// cached by that.
    ///
    /// # Errors
    /// As [`Self::read`]; the content of the buffers is undefined then.
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

    /// Reads and verifies the stored (compressed) bytes of a frame; `None` where it is stored uncompressed, or where
    /// that is not possible.
    ///
    /// # Errors
    /// As [`Self::read`].
    fn read_stored(&self, pointer: &Pointer) -> Result<Option<Vec<u8>>, PoolError> {
        let _ = pointer;
        Ok(None)
    }

    /// Announces that frames will be read soon, in this order (readahead). Never fails: it is a hint.
    fn expect(&self, pointers: &[Pointer]);

    /// Announces frames as [`Self::expect`], without waiting for the requests. The frames `beyond` will be announced
    /// later, and may be requested already where they share a block ([`Reach::block`]).
    fn expect_later(&self, pointers: &[Pointer], beyond: &[Pointer]) {
        let _ = beyond;
        self.expect(pointers);
    }

    /// How far readahead is worthwhile.
    fn ahead(&self) -> Reach {
        Reach::OF_DEVICES
    }

    /// Waits while earlier writes are slower than new ones arrive. Not under any lock, and not with a txg held open.
    fn await_room(&self) {}

    /// Makes room for this many bytes of content, if there is too little, so that writes which hold locks need not
    /// clean for it; returns whether there is as much now. Not under any lock, and not with a txg held open.
    ///
    /// # Errors
    /// As [`Self::write`], except for [`PoolError::NoSpace`].
    fn make_room(&self, bytes: u64) -> Result<bool, PoolError> {
        let _ = bytes;
        Ok(true)
    }

    /// Writes a frame; it is durable once its txg is committed.
    ///
    /// # Errors
    /// [`PoolError::NoSpace`], [`PoolError::Device`], [`PoolError::Suspended`].
    fn write(&self, frame: &NewFrame<'_>) -> Result<Pointer, PoolError>;

    /// Writes several frames, one after the other; compresses them by several threads where that pays. `written` gets
    /// the pointers of the written frames, in order: all of them, or those before the one that failed.
    ///
    /// # Errors
    /// As [`Self::write`].
    fn write_all(&self, frames: &[NewFrame<'_>], written: &mut Vec<Pointer>) -> Result<(), PoolError> {
        frames.iter().try_for_each(|frame| {
            written.push(self.write(frame)?);
            Ok(())
        })
    }

    /// Compresses frames before they are written, by several threads where that pays; uses no space of the pool, and
    /// ignores the frames' txg. Empty where the implementation cannot compress separately.
    ///
    /// # Errors
    /// As [`Self::write`].
    fn compress_all(&self, frames: &[NewFrame<'_>]) -> Result<Vec<Compressed>, PoolError> {
        let _ = frames;
        Ok(Vec::new())
    }

    /// Writes as [`Self::write`], with the result of [`Self::compress_all`] for a frame with the same content,
    /// compression and checksum.
    ///
    /// # Errors
    /// As [`Self::write`]; [`PoolError::Refused`] for a sealed frame where the implementation keeps content only: it
    /// would be stored in the clear.
    fn write_compressed(&self, frame: &NewFrame<'_>, compressed: &Compressed) -> Result<Pointer, PoolError> {
        if compressed.sealed.is_some() || compressed.pointer.is_sealed() {
            return Err(PoolError::Refused("a sealed frame has no place here".to_owned()));
        }
        self.write(frame)
    }
}
