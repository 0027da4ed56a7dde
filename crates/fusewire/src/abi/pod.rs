//! Structs of the wire as bytes and back.
//!
//! Called by request parsing, reply building and the transports. Invariant: only structs declared
//! by [`wire!`] are [`Pod`], and the macro proves at compile time that they have no padding and
//! exactly the size of the kernel's header. This is the only file of the crate in which bytes are
//! reinterpreted.

use std::mem::{MaybeUninit, size_of};

/// Plain old data: every bit pattern is a value and every byte belongs to a field.
///
/// # Safety
/// The type must be `repr(C)`, without padding, and valid for every bit pattern.
pub unsafe trait Pod: Copy + Send + Sync + 'static {
    /// The bytes of the value, in the machine's byte order (which is the protocol's).
    fn bytes(&self) -> &[u8] {
        // SAFETY: the trait promises that all `size_of` bytes are initialised (no padding); the
        // borrow keeps them alive.
        unsafe { std::slice::from_raw_parts(std::ptr::from_ref(self).cast::<u8>(), size_of::<Self>()) }
    }

    /// Reads a value from the start of `bytes`; `None` if they are too few. Alignment does not
    /// matter.
    fn read(bytes: &[u8]) -> Option<Self> {
        let source = bytes.get(..size_of::<Self>())?;
        let mut value = MaybeUninit::<Self>::uninit();
        // SAFETY: `source` holds exactly `size_of::<Self>()` bytes, `value` has room for them, and
        // they cannot overlap; the trait promises that any bit pattern is a value, so it is
        // initialised afterwards.
        unsafe {
            std::ptr::copy_nonoverlapping(source.as_ptr(), value.as_mut_ptr().cast::<u8>(), size_of::<Self>());
            Some(value.assume_init())
        }
    }

    /// Writes the value to the start of `bytes`; `None` (and nothing is written) if there is no
    /// room.
    fn write(&self, bytes: &mut [u8]) -> Option<()> {
        bytes.get_mut(..size_of::<Self>())?.copy_from_slice(self.bytes());
        Some(())
    }
}

/// Declares structs of the wire: `repr(C)`, all zero by default, [`Pod`], with the size in bytes
/// that the kernel's header gives.
macro_rules! wire {
    ($($(#[$meta:meta])* pub struct $name:ident = $size:literal { $(pub $field:ident: $type:ty),* $(,)? })*) => {$(
        $(#[$meta])*
        #[repr(C)]
        #[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
        pub struct $name { $(pub $field: $type),* }

        const _: () = assert!(std::mem::size_of::<$name>() == $size && 0 $(+ std::mem::size_of::<$type>())* == $size);

        // SAFETY: `repr(C)`; the assertion above shows that the fields fill the struct, so there is
        // no padding; all fields are integers, arrays of integers, or structs declared by this
        // macro, so every bit pattern is a value.
        unsafe impl $crate::abi::Pod for $name {}
    )*};
}
pub(crate) use wire;
